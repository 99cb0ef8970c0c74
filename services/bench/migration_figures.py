"""Moves as figures."""

from libs.cost.migration import kv_bytes, pause_away_seconds, pause_home_seconds, weight_bytes
from services.bench.figures import Figure
from services.bench.migration_mesh import NUM_STREAMS
from services.bench.migration_trips import Measured, Trip, Watched

MIB = 1 << 20


def cost_figures(measured: Measured) -> list[Figure]:
    """What does not belong to any move."""
    step, cost = measured.quiet_step_seconds, measured.hosting
    return [
        _milliseconds(f"{measured.dtype}: step of 16 sequences, nothing away", step),
        _steps(f"{measured.dtype}: longest gap without a move", measured.quiet_gap_seconds, step),
        Figure(f"{measured.dtype}: call to a host and back", cost.round_trip_seconds * 1e6, "us"),
        Figure(f"{measured.dtype}: KV written at a host", cost.bytes_per_second / 1e9, "GB/s"),
        Figure(f"{measured.dtype}: KV rewritten at home", cost.rewrite_bytes_per_second / 1e9, "GB/s"),
    ]


def trip_figures(measured: Measured, trip: Trip) -> list[Figure]:
    """One module, away and back."""
    name = f"{measured.dtype}: {trip.kind.name}"
    away, home = trip.away, trip.home
    blocks_away = measured.expected_blocks(trip.kind)
    return [
        *_move_figures(f"{name}, away", measured, trip, away, blocks_away),
        _milliseconds(f"{name}: added to each step", trip.overhead_seconds, trip.formula_seconds, "formula"),
        *_move_figures(f"{name}, back", measured, trip, home, measured.num_blocks),
    ]


def _move_figures(
    name: str, measured: Measured, trip: Trip, watched: Watched, num_blocks: int
) -> list[Figure]:
    record, step = watched.record, watched.before_seconds
    most = trip.kind.most_steps
    module, shape = trip.kind.module, measured.shape
    live = kv_bytes(shape, module, watched.num_live_blocks)
    before, after = record["num_blocks_before"], record["num_blocks_after"]
    figures = [
        _steps(f"{name}: longest gap at clients", watched.client_gap_seconds, step, most),
        _steps(f"{name}: longest gap at the worker", watched.worker_gap_seconds, step, most),
        _milliseconds(
            f"{name}: pause", record["pause_seconds"], _pause_seconds(measured, trip, watched), "formula"
        ),
        _steps(f"{name}: step during the move", watched.during_seconds, step),
        _steps(f"{name}: step after it", watched.after_seconds, step),
        Figure(
            f"{name}: KV copied, {record['num_rounds']} rounds more",
            record["num_kv_bytes"] / MIB,
            "MiB",
            live / MIB,
            "KV held at its begin",
        ),
        Figure(f"{name}: KV blocks, {before} before", after, "", num_blocks, "arithmetic"),
    ]
    if trip.kind.with_weights and not record["is_return"]:
        expected = weight_bytes(shape, module, with_weights=True) / MIB
        travelled = record["num_weight_bytes"] / MIB
        figures.insert(5, Figure(f"{name}: weights", travelled, "MiB", expected, "arithmetic"))
    return figures


def _pause_seconds(measured: Measured, trip: Trip, watched: Watched) -> float:
    cost, shape, module, live = measured.hosting, measured.shape, trip.kind.module, watched.num_live_blocks
    if not watched.record["is_return"]:
        return pause_away_seconds(
            cost.rewrite_bytes_per_second, shape, module, live, num_sequences=NUM_STREAMS
        )
    return pause_home_seconds(
        cost.link, cost.rewrite_bytes_per_second, shape, module, live, num_sequences=NUM_STREAMS
    )


def _steps(name: str, seconds: float, step_seconds: float, most: float | None = None) -> Figure:
    at_most = None if most is None else most * step_seconds * 1e3
    return Figure(name, seconds * 1e3, "ms", step_seconds * 1e3, "step before", at_most=at_most)


def _milliseconds(
    name: str, seconds: float, reference: float | None = None, reference_name: str = ""
) -> Figure:
    return Figure(name, seconds * 1e3, "ms", None if reference is None else reference * 1e3, reference_name)
