from dataclasses import replace
from typing import Any

import msgspec
import pytest

from libs.cost.migration import ModelShape
from libs.placement.module import ModuleKind
from libs.placement.placement import Placed, all_home, check_module
from services.bench.migration_costs import HostingCost
from services.bench.migration_figures import trip_figures
from services.bench.migration_mesh import Arrivals, WatchedMesh, longest_gap, median_gap
from services.bench.migration_trips import Measured, MoveKind, Trip, Watched, kinds_of

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
MEASURED = Measured(
    dtype="bfloat16",
    shape=SMOLLM2,
    hosting=HostingCost(3e-4, 1e9, 5e9),
    num_blocks=1000,
    num_least_blocks=100,
    quiet_gap_seconds=0.02,
    quiet_step_seconds=0.01,
)
KINDS = {kind.name: kind for kind in kinds_of(SMOLLM2.num_layers, SMOLLM2.num_kv_heads)}


def watched(**facts: Any) -> Watched:
    record = {
        "is_return": False,
        "pause_seconds": 0.012,
        "num_rounds": 2,
        "num_kv_bytes": 3 << 20,
        "num_weight_bytes": 0,
        "num_blocks_before": 1000,
        "num_blocks_after": 1500,
    }
    return replace(Watched(record, 0.01, 0.011, 0.014, 0.029, 0.031, num_live_blocks=64), **facts)


def test_a_gap_counts_where_any_part_of_it_lies_in_the_span() -> None:
    arrivals = Arrivals([0.0, 1.0, 4.0, 4.5])
    assert arrivals.gaps(1.5, 2.0) == [3.0]
    assert arrivals.gaps(0.5, 4.2) == [1.0, 3.0, 0.5]
    assert longest_gap([arrivals, Arrivals([0.0, 5.0])], 0.0, 5.0) == 5.0
    assert median_gap(arrivals, 0.0, 5.0) == 1.0


def test_a_stream_to_which_nothing_came_is_no_short_gap() -> None:
    assert longest_gap([Arrivals()], 0.0, 1.0) == float("inf")


def test_each_kind_of_move_is_one_that_the_instance_can_make() -> None:
    assert list(KINDS) == ["1 of 3 KV heads", "2 of 3 KV heads", "10 layers, offload", "10 layers, migrate"]
    for kind in KINDS.values():
        check_module(all_home("home", 30, 3), kind.module)
        assert kind.most_steps == (3.0 if kind.module.kind is ModuleKind.HEADS else 5.0)


@pytest.mark.parametrize("num_copies", [1, 2])  # packed alone, or beside a plain one
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_expected_blocks_are_those_that_both_memories_hold(kind: MoveKind, num_copies: int) -> None:
    layer_bytes = num_copies * SMOLLM2.layer_weight_bytes
    shape = msgspec.structs.replace(SMOLLM2, layer_memory_bytes=layer_bytes)
    blocks = replace(MEASURED, shape=shape).expected_blocks(kind)
    placed = Placed(move_id="m", module=kind.module, worker="host")
    stays = len(all_home("home", 30, 3).with_module(placed).resident_slots())
    slot_bytes = SMOLLM2.block_bytes // 90
    pool_bytes, least_bytes = 1000 * SMOLLM2.block_bytes, 100 * SMOLLM2.block_bytes
    weights = 10 * layer_bytes if kind.with_weights else 0

    def fits(count: int) -> bool:
        at_home = count * stays * slot_bytes <= pool_bytes + weights
        return at_home and count * (90 - stays) * slot_bytes + weights + least_bytes <= pool_bytes

    assert fits(blocks)
    assert not fits(blocks + 1)


def test_a_trip_is_told_with_its_aims() -> None:
    kind = KINDS["1 of 3 KV heads"]
    away = watched()
    home = watched(
        record=away.record | {"is_return": True},
        before_seconds=0.014,
        after_seconds=0.01,
        client_gap_seconds=0.05,
    )
    figures = {figure.name: figure for figure in trip_figures(MEASURED, Trip(kind, away, home, 0.003))}
    name = "bfloat16: 1 of 3 KV heads"
    assert figures[f"{name}, away: longest gap at clients"].met
    assert not figures[f"{name}, away: longest gap at the worker"].met
    assert figures[f"{name}, back: longest gap at clients"].at_most == pytest.approx(42.0)
    assert not figures[f"{name}, back: longest gap at clients"].met
    added = figures[f"{name}: added to each step"]
    assert added.value == pytest.approx(4.0)
    assert added.reference == pytest.approx(3.0)
    assert figures[f"{name}, away: KV blocks, 1000 before"].reference == 1500


def test_a_pause_is_told_beside_its_formula() -> None:
    kind, way_out = KINDS["1 of 3 KV heads"], watched()
    way_home = watched(record=way_out.record | {"is_return": True})
    figures = {figure.name: figure for figure in trip_figures(MEASURED, Trip(kind, way_out, way_home, 0.003))}
    live_bytes, last_bytes = 64 * SMOLLM2.block_bytes, 16 * SMOLLM2.block_bytes / 3
    away, back = (figures[f"bfloat16: {kind.name}, {way}: pause"] for way in ("away", "back"))
    assert (away.value, away.reference_name) == (pytest.approx(12.0), "formula")
    assert away.reference == pytest.approx(1e3 * (2 / 3 * live_bytes + last_bytes) / 5e9)
    assert back.reference == pytest.approx(1e3 * (live_bytes / 5e9 + last_bytes / 1e9 + 3e-4))


def test_streams_hold_blocks_for_their_prompts_and_what_came() -> None:
    mesh = WatchedMesh.__new__(WatchedMesh)
    mesh.streams = [Arrivals(), Arrivals([0.0] * 17)]
    mesh.num_prompt_tokens = 32
    assert mesh.num_live_blocks(16) == 2 + 4
