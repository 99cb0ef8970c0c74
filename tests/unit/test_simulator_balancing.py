"""The coordinator's live loop on the simulated mesh."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.placement.module import heads_of, whole_layers
from libs.placement.placement import PlacedModule, all_at_owner
from libs.simulator.__main__ import main
from libs.simulator.balance_compare import compare_balancing, model_of, skewed_load
from libs.simulator.pace import Pace
from libs.simulator.settings import SimulatorSettings
from libs.simulator.shared_devices import Use, device_use, fractions, slowdown

SKEWED = SimulatorSettings(
    prefill=2,
    decode=2,
    requests=200,
    requests_per_second=20.0,
    decode_step_seconds=5e-3,
    decode_sequence_seconds=2e-3,
    output_tokens=128,
    balance=True,
)


def away(worker, module, move_id="m"):
    return PlacedModule(move_id=move_id, module=module, worker=worker)


def test_on_a_skewed_load_the_loop_brings_throughput():
    off, on = compare_balancing(SKEWED)
    assert (off.num_moves, off.is_on, on.is_on) == (0, False, True)
    assert on.num_moves > 0
    assert on.tokens_per_second > 1.2 * off.tokens_per_second
    assert on.num_requests == off.num_requests == 200


def test_where_decode_memory_is_short_the_loop_brings_throughput():
    settings = SimulatorSettings(
        prefill=2,
        decode=2,
        requests=160,
        requests_per_second=20.0,
        decode_step_seconds=5e-3,
        decode_sequence_seconds=2e-3,
        output_tokens=256,
        decode_blocks=100,
        prefill_blocks=200,
    )
    off, on = compare_balancing(settings)
    assert on.tokens_per_second > 1.2 * off.tokens_per_second
    assert on.mean_peak_utilization < off.mean_peak_utilization


def test_the_same_flags_give_the_same_moves():
    assert compare_balancing(SKEWED) == compare_balancing(SKEWED)


def test_the_command_prints_both(monkeypatch, capsys):
    flags = ["--balance", "--requests", "60", "--prefill", "2", "--decode", "2"]
    monkeypatch.setattr("sys.argv", ["simulator", *flags])
    main()
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["loop", "off", "on", "throughput"]
    monkeypatch.setattr("sys.argv", ["simulator", *flags, "--output", "json"])
    main()
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["off", "on"]
    assert told["off"]["num_requests"] == 60


def test_blocks_too_small_for_any_model_end_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simulator", "--balance", "--block-bytes", "100"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "raise --block-bytes" in capsys.readouterr().err


def test_the_load_has_long_prompts_first_and_long_answers_later():
    load = skewed_load(SKEWED)
    assert [one.num_input_tokens for one in load[:2]] == [2048, 2048]
    assert [one.num_output_tokens for one in load[-2:]] == [128, 128]
    assert all(one.num_output_tokens == 8 for one in load[:100])
    assert all(one.num_input_tokens == 128 for one in load[100:])


def test_the_model_has_blocks_of_the_size_that_was_asked_for():
    assert model_of(SKEWED).block_bytes == SKEWED.block_bytes


def test_a_step_takes_as_long_as_its_shares_or_its_ways():
    assert Pace().wall_seconds(2.0) == 2.0
    assert Pace(4.0, 1.0).wall_seconds(2.0) == 8.0, "the share is saved up on the way"
    assert Pace(1.0, 1.0).wall_seconds(2.0) == 3.0


def test_work_goes_where_the_module_is():
    placement = all_at_owner("a", 10, 4).with_module(away("b", whole_layers(0, 5), "m1"))
    placement = placement.with_module(away("c", heads_of(5, 10, (3,)), "m2"))
    parts = fractions(placement, 0.2)
    assert parts == pytest.approx({"a": 0.475, "b": 0.5, "c": 0.025})


@given(st.integers(1, 9), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_what_devices_do_adds_up_to_what_the_instances_take(num_layers, busy_a, busy_b):
    there = all_at_owner("a", 10, 4).with_module(away("b", whole_layers(0, num_layers)))
    parts = {"a": fractions(there, 0.2), "b": {"b": 1.0}}
    use = device_use({"a": busy_a, "b": busy_b}, parts)
    assert sum(one.own + one.hosted for one in use.values()) == pytest.approx(busy_a + busy_b)
    assert use["b"].hosted == pytest.approx(busy_a * num_layers / 10)


def test_an_instance_is_as_slow_as_the_slowest_of_its_parts():
    idle = {"a": Use(0.0, 0.0), "b": Use(0.0, 0.0)}
    assert slowdown("a", {"a": 1.0}, 0.0, idle, 0.25) == 4.0
    assert slowdown("a", {"a": 0.5, "b": 0.5}, 0.0, idle, 0.25) == 2.0
    busy = {"a": Use(0.0, 0.0), "b": Use(0.25, 0.0)}
    assert slowdown("a", {"a": 0.5, "b": 0.5}, 0.0, busy, 0.25) == 4.0, "half of b is left"
    assert slowdown("a", {"a": 1.0}, 0.0, idle, 1.0) == 1.0
