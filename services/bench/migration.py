"""Moves of modules while 16 sequences decode: what clients notice, what is copied, what a step pays after."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from libs.bus.messages.presence import Presence
from libs.cost.migration import shape_of, step_overhead_seconds
from libs.worker.migration.threads import run_in_thread
from services.bench.figures import Figure
from services.bench.migration_costs import attention_parts, measure_hosting
from services.bench.migration_figures import cost_figures, trip_figures
from services.bench.migration_mesh import NUM_STREAMS, WatchedMesh, longest_gap, median_gap, watched_mesh
from services.bench.migration_trips import Measured, MoveKind, Trip, Watched, kinds_of

DTYPES = ("float32", "bfloat16")
LOOK_SECONDS = 1.2
"""How long steps are watched before a move and after it."""
AFTERMATH_SECONDS = 0.1
"""What comes so soon after a move still counts as during it."""
MESH = ("--num-blocks", "1024", "--max-model-len", "2048")


def measure_migration(say: Callable[[str], None]) -> list[Figure]:
    """SmolLM2, a thread for each worker; about a minute."""
    figures: list[Figure] = []
    for dtype in DTYPES:
        measured = asyncio.run(_measure(dtype, partial(_say, say, dtype)))
        figures += cost_figures(measured)
        for trip in measured.trips:
            figures += trip_figures(measured, trip)
    return figures


def _say(say: Callable[[str], None], dtype: str, doing: str) -> None:
    say(f"{dtype}: {doing}")


async def _measure(dtype: str, say: Callable[[str], None]) -> Measured:
    say("starting a mesh")
    async with watched_mesh("--dtype", dtype, *MESH) as mesh:
        presence = msgspec.convert(mesh.host, Presence)
        shape = shape_of(presence)
        if shape is None:
            raise RuntimeError(f"{presence.name} does not tell the shape of its model")
        hosting = await measure_hosting(presence, shape, mesh.link_secret)
        say("steps without a move")
        began, ended = await _look(2 * LOOK_SECONDS)
        measured = Measured(
            dtype=dtype,
            shape=shape,
            hosting=hosting,
            num_blocks=mesh.home["load"]["num_blocks"],
            num_least_blocks=-(-presence.max_model_len // shape.block_size),
            quiet_gap_seconds=longest_gap(mesh.streams, began, ended),
            quiet_step_seconds=median_gap(mesh.frames, began, ended),
        )
        for kind in kinds_of(shape.num_layers, shape.num_kv_heads):
            say(f"{kind.name}, away and back")
            measured.trips.append(await _trip(mesh, kind, measured))
    return measured


async def _trip(mesh: WatchedMesh, kind: MoveKind, measured: Measured) -> Trip:
    away = await _watch(mesh, kind.asked, measured)
    home = await _watch(mesh, {"return_of": away.record["id"]}, measured)
    num_context = away.num_live_blocks * measured.shape.block_size // NUM_STREAMS
    remote, local = await run_in_thread(
        partial(
            attention_parts, measured.shape, kind.module, num_sequences=NUM_STREAMS, num_context=num_context
        )
    )
    formula = step_overhead_seconds(
        measured.hosting.link,
        measured.shape,
        kind.module,
        NUM_STREAMS,
        remote_attention_seconds=remote,
        local_attention_seconds=local,
    )
    return Trip(kind, away, home, formula)


async def _watch(mesh: WatchedMesh, asked: dict[str, Any], measured: Measured) -> Watched:
    num_live = mesh.num_live_blocks(measured.shape.block_size)
    began = time.perf_counter()
    record = await mesh.move(asked)
    ended = began + record["ended_unix_seconds"] - record["started_unix_seconds"] + AFTERMATH_SECONDS
    _, looked = await _look(LOOK_SECONDS)
    return Watched(
        record=record,
        before_seconds=median_gap(mesh.frames, began - LOOK_SECONDS, began),
        client_gap_seconds=longest_gap(mesh.streams, began, ended),
        worker_gap_seconds=longest_gap([mesh.frames], began, ended),
        during_seconds=median_gap(mesh.frames, began, ended),
        after_seconds=median_gap(mesh.frames, looked - LOOK_SECONDS, looked),
        num_live_blocks=num_live,
    )


async def _look(seconds: float) -> tuple[float, float]:
    """Lets steps pass; returns from when to when."""
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    return began, time.perf_counter()
