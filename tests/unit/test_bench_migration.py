from dataclasses import replace
from typing import Any

import pytest

from libs.cost.migration import ModelShape
from libs.placement.module import ModuleKind
from libs.placement.placement import all_at_owner, check_module
from tests.bench.migration import (
    Arrivals,
    Watched,
    WatchedMesh,
    case_figures,
    cases_of,
    longest_gap,
    median_gap,
)

SMOLLM2 = ModelShape(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    element_bytes=2,
    layer_weight_bytes=7_000_000,
    layer_memory_bytes=7_000_000,
    block_size=16,
)
CASES = {case.name: case for case in cases_of(SMOLLM2.num_layers, SMOLLM2.num_kv_heads)}


def watched(**facts: Any) -> Watched:
    record = {
        "pause_seconds": 0.012,
        "num_rounds": 2,
        "num_kv_bytes": 3 << 20,
        "num_weight_bytes": 0,
        "num_blocks_before": 1000,
        "num_blocks_after": 1500,
    }
    return replace(Watched(record, 0.01, 0.011, 0.014, 0.029, num_live_blocks=64), **facts)


def test_a_gap_counts_where_any_part_of_it_lies_in_the_span() -> None:
    arrivals = Arrivals([0.0, 1.0, 4.0, 4.5])
    assert arrivals.gaps(1.5, 2.0) == [3.0]
    assert arrivals.gaps(0.5, 4.2) == [1.0, 3.0, 0.5]
    assert longest_gap([arrivals, Arrivals([0.0, 5.0])], 0.0, 5.0) == 5.0
    assert median_gap([arrivals, Arrivals([0.0, 0.6])], 0.0, 5.0) == pytest.approx(0.8)


def test_a_stream_to_which_nothing_came_is_no_short_gap() -> None:
    assert longest_gap([Arrivals()], 0.0, 1.0) == float("inf")


def test_each_case_is_one_that_the_instance_can_make() -> None:
    assert list(CASES) == ["1 of 3 KV heads", "2 of 3 KV heads", "10 layers, offload", "10 layers, migrate"]
    for case in CASES.values():
        check_module(all_at_owner("owner", 30, 3), case.module)
        assert case.max_steps == (3.0 if case.module.kind is ModuleKind.HEADS else 5.0)


def test_both_directions_are_held_against_their_aims() -> None:
    away = watched()
    back = watched(step_before=0.014, step_after=0.01, longest_gap=0.05)
    name = "bfloat16: 1 of 3 KV heads"
    figures = {one.name: one for one in case_figures(name, CASES["1 of 3 KV heads"], SMOLLM2, away, back)}
    assert figures[f"{name}, away: longest gap at clients"].met
    assert figures[f"{name}, back: longest gap at clients"].at_most == pytest.approx(42.0)
    assert not figures[f"{name}, back: longest gap at clients"].met
    assert figures[f"{name}: added to each step"].value == pytest.approx(4.0)
    assert figures[f"{name}, away: pause"].value == pytest.approx(12.0)
    held = figures[f"{name}, away: KV copied, 2 rounds more"].reference
    assert held == pytest.approx(64 * SMOLLM2.block_bytes / 3 / 2**20)
    assert figures[f"{name}, away: KV blocks of the owner"].ratio == pytest.approx(1.5)


def test_streams_hold_blocks_for_their_prompts_and_what_came() -> None:
    mesh = WatchedMesh.__new__(WatchedMesh)
    mesh.streams = [Arrivals(), Arrivals([0.0] * 17)]
    mesh.num_prompt_tokens = 32
    assert mesh.num_live_blocks(16) == 2 + 4
