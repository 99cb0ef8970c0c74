"""Figures from records."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import Record
from loadtest.report import Targets, distribution, report
from loadtest.tables import figure_of, summary_lines


def answered(due: float = 0.0, *tokens: float, end: float | None = None, **facts: Any) -> Record:
    known: dict[str, Any] = {"sent_seconds": due, "token_seconds": list(tokens), **facts}
    return Record("c", 0, due, end_seconds=end if end is not None else tokens[-1], **known)


def figures(*records: Record, end_seconds: float = 10.0, **options: Any) -> dict[str, Any]:
    return report(records, end_seconds=end_seconds, **{"targets": Targets(), **options})


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=300))
def test_percentiles_are_values_that_occurred_and_as_many_lie_below_as_they_say(values: list[float]) -> None:
    told = distribution(values)
    assert told is not None
    rounded = [round(value, 6) for value in values]
    for rank in (50, 90, 99):
        found = told[f"p{rank}"]
        assert found in rounded
        assert sum(value <= found for value in rounded) >= rank / 100 * len(values)
        assert sum(value < found for value in rounded) < rank / 100 * len(values)
    assert told["max"] == max(rounded)
    assert told["count"] == len(values)


def test_no_values_are_no_distribution() -> None:
    assert distribution([None, None]) is None


def test_times_are_taken_from_sending_and_between_pieces() -> None:
    told = figures(answered(1.0, 1.5, 1.6, 1.8, end=1.9))
    assert told["time_to_first_token_seconds"]["mean"] == 0.5
    assert told["end_to_end_seconds"]["mean"] == 0.9
    assert told["inter_token_latency_seconds"]["count"] == 2
    assert told["inter_token_latency_seconds"]["max"] == 0.2
    assert told["time_per_output_token_seconds"]["mean"] == 0.15


def test_a_server_that_packs_tokens_together_is_counted_by_its_own_word() -> None:
    told = figures(answered(0.0, 1.0, 2.0, num_told_tokens=11))
    assert told["tokens"]["output"] == 11
    assert told["time_per_output_token_seconds"]["mean"] == 0.1
    assert told["throughput"]["output_tokens_per_second"] == 5.5


def test_failures_count_by_kind_and_in_no_latency() -> None:
    told = figures(
        answered(0.0, 1.0, 2.0),
        answered(0.0, end=0.1, error="http_429"),
        answered(0.0, end=0.2, error="http_429"),
        answered(0.0, 0.5, end=0.6, error="broken_off"),
    )
    assert told["errors"] == {"http_429": 2, "broken_off": 1}
    assert (told["requests"]["succeeded"], told["requests"]["failed"]) == (1, 3)
    assert told["time_to_first_token_seconds"]["count"] == 1


def test_what_the_end_of_the_test_cut_is_neither_good_nor_failed() -> None:
    told = figures(answered(0.0, 1.0, was_cancelled=True), Record("c", 0, 2.0))
    assert (told["requests"]["due"], told["requests"]["cut_off"]) == (2, 2)
    assert (told["requests"]["succeeded"], told["requests"]["failed"]) == (0, 0)


def test_what_was_held_back_is_told() -> None:
    told = figures(answered(0.0, 1.0), answered(0.0, 3.0, sent_seconds=2.0))
    assert (told["requests"]["held_back"], told["requests"]["longest_held_back_seconds"]) == (1, 2.0)
    assert told["time_to_first_token_seconds"]["max"] == 1.0
    assert any("held back" in line for line in summary_lines(told))


def test_requests_of_the_warm_up_do_not_count() -> None:
    told = figures(answered(0.0, 9.0), answered(5.0, 6.0), warmup_seconds=5.0)
    assert told["requests"]["due"] == 1
    assert told["seconds"] == 1.0
    assert told["time_to_first_token_seconds"]["mean"] == 1.0


def test_goodput_counts_whole_answers_in_time() -> None:
    records = [
        answered(0.0, 0.1, 0.2, 0.3),
        answered(0.0, 0.9, 1.0, 1.1),
        answered(0.0, 0.1, 0.9),
        answered(0.0, 0.1, end=0.1, error="broken_off"),
        answered(0.0, 0.1),
    ]
    targets = Targets(first_token_seconds=0.5, output_token_seconds=0.2)
    told = figures(*records, targets=targets)
    assert told["goodput"]["share"] == pytest.approx(2 / 5)
    assert figures(*records)["goodput"] is None
    assert figures(*records, targets=Targets(total_seconds=1.0))["goodput"]["share"] == pytest.approx(3 / 5)


def test_an_answer_without_text_keeps_its_targets_if_its_end_comes_in_time() -> None:
    assert not Targets(first_token_seconds=1.0).are_met(answered(0.0, end=1.1))
    assert Targets(first_token_seconds=1.0).are_met(answered(0.0, end=0.1))
    assert Targets(total_seconds=1.0).are_met(answered(0.0, end=0.1))


def test_the_cached_share_is_of_those_who_tell_it() -> None:
    told = figures(
        answered(0.0, 1.0, num_prompt_tokens=100, num_cached_tokens=50),
        answered(0.0, 1.0, num_prompt_tokens=300, num_cached_tokens=0),
        answered(0.0, 1.0, num_prompt_tokens=1000),
        answered(0.0, 1.0),
    )
    assert told["tokens"] == {"prompt": 1400, "output": 4, "cached": 50, "cached_share": 0.125}
    assert figures(answered(0.0, 1.0))["tokens"]["cached_share"] is None


def test_an_empty_test_has_a_report_that_is_json() -> None:
    told = json.loads(json.dumps(figures(end_seconds=0.0, targets=Targets(total_seconds=1))))
    assert told["requests"]["due"] == 0
    assert summary_lines(told)
    assert figure_of(told, ("time_to_first_token_seconds", "p99")) is None
    assert figure_of(told, ("throughput", "requests_per_second")) == 0.0
