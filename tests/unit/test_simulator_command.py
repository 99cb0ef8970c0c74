"""python -m libs.simulator, and what it prints."""

import json
import math

import pytest

from libs.routing.policies import POLICIES
from libs.simulator.__main__ import main
from libs.simulator.job import Job
from libs.simulator.report import as_table, make_report
from libs.simulator.trace import TraceRequest


def run(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["simulator", *arguments])
    main()
    return capsys.readouterr().out


def test_all_policies_are_compared_unless_some_are_named(monkeypatch, capsys):
    every = json.loads(run(monkeypatch, capsys, "--requests", "50", "--output", "json"))
    assert list(every) == list(POLICIES)
    two = json.loads(
        run(monkeypatch, capsys, "--requests", "50", "--output", "json", "--policy", "random,least_load")
    )
    assert list(two) == ["random", "least_load"]


def test_a_report_tells_times_hits_and_shares(monkeypatch, capsys):
    arguments = ("--requests", "300", "--policy", "least_load", "--output", "json", "--prefill", "3")
    report = json.loads(run(monkeypatch, capsys, *arguments))["least_load"]
    assert report["num_requests"] == 300
    assert set(report["ttft_seconds"]) == {"mean", "p50", "p99"}
    assert set(report["hit_rates"]) == {"device", "memory", "disk"}
    assert list(report["work_shares"]) == ["prefill-0", "prefill-1", "prefill-2"]


def test_the_same_flags_print_the_same(monkeypatch, capsys):
    arguments = ("--requests", "200", "--arrivals", "bursty", "--seed", "7", "--output", "json")
    assert run(monkeypatch, capsys, *arguments) == run(monkeypatch, capsys, *arguments)


def test_a_trace_is_replayed_from_its_file(monkeypatch, capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * n, "input_length": 1530, "output_length": 3, "hash_ids": [0, n + 1, n + 9]}
        for n in range(5)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    table = run(monkeypatch, capsys, "--trace", str(path), "--policy", "round_robin")
    assert table.splitlines()[1].startswith("round_robin")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "fastest"), "no policy 'fastest'"),
        (("--trace", "/nowhere/trace.jsonl"), "/nowhere/trace.jsonl"),
        (("--prefill", "0"), "--prefill"),
        (("--polcy", "random"), "--polcy"),
    ],
)
def test_what_cannot_be_asked_ends_with_one_line_and_two(monkeypatch, capsys, arguments, complaint):
    monkeypatch.setattr("sys.argv", ["simulator", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def job_of(number: int, ttft: float, num_output: int = 11) -> Job:
    job = Job(number, TraceRequest(1.0, 100, num_output, []), [])
    job.num_here_blocks, job.num_memory_blocks, job.num_disk_blocks = 2, 1, 1
    job.prefilled_at, job.finished_at = 1.0 + ttft, 1.0 + ttft + 2.0
    return job


def test_figures_are_over_all_requests_that_were_served():
    jobs = [job_of(n, ttft) for n, ttft in enumerate((1.0, 2.0, 6.0))]
    report = make_report("any", jobs, 1, {"a": 3.0, "b": 1.0}, block_size=10)
    assert (report.num_requests, report.num_refused, report.makespan_seconds) == (4, 1, 9.0)
    assert (report.ttft_seconds.mean, report.ttft_seconds.p50) == (3.0, 2.0)
    assert report.token_seconds.mean == pytest.approx(0.2)
    assert report.output_tokens_per_second == pytest.approx(33 / 9)
    assert (report.hit_rates.device, report.hit_rates.memory, report.hit_rates.disk) == (0.2, 0.1, 0.1)
    assert report.work_shares == {"a": 0.75, "b": 0.25}


def test_a_replay_in_which_nothing_was_served_has_figures_too():
    report = make_report("none", [], 3, {"a": 0.0}, block_size=10)
    assert report.num_requests == 3
    assert not math.isnan(report.ttft_seconds.mean)
    assert "none" in as_table([report])
