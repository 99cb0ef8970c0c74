"""A home that stands still for longer than its host's lease, and Ctrl-C in the middle of a move: what is away
comes home, texts are right, and nothing is left."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from mesh_moves import Moves, load_on, moves_of, until_none

from black_box import Mesh, child_of, until

pytestmark = pytest.mark.system
MESH = "moving"

NUM_STREAMS = 4
ANSWER_TOKENS = 32
HEARD_SECONDS = 30.0
END_SECONDS = 40.0

HOME, HOST = "decode-0", "decode-1"
LAYERS = {"layers": [2, 5], "kind": "migrate"}
SMALL = {"layers": [1, 2], "kv_heads": [1]}


@pytest.fixture
async def moves(mesh: Mesh) -> AsyncIterator[Moves]:
    async with moves_of(mesh) as moves:
        moves.patience_seconds = 10.0
        yield moves


def prompts() -> list[str]:
    river = "today I walked along the river and saw many birds. "
    return [f"Letter {i}. Dear friend, " + river * (2 + 3 * (i % 4)) for i in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def answers(reference: Callable[[list[str], int], list[str]]) -> list[str]:
    return reference(prompts(), ANSWER_TOKENS)


async def wait_phase(moves: Moves, move_id: str, phase: str) -> None:
    async def other() -> list[object]:
        now = (await moves.record(move_id)).get("phase")
        return [] if now == phase else [now]

    await until_none(other, HEARD_SECONDS)


async def wait_told(moves: Moves, move_id: str, why: str) -> None:
    """Of how it ended the home has the last word, also where it was thought to have left."""

    async def otherwise() -> list[object]:
        record = await moves.record(move_id)
        is_so = record["phase"] == ("failed" if why else "done") and why in record["error"]
        return [] if is_so else [record]

    await until_none(otherwise, HEARD_SECONDS)


async def wait_freed(moves: Moves) -> None:
    """Until the host holds nothing of others."""

    async def held() -> list[object]:
        told = (await moves.placement())[HOST]
        return [*told["hosted"], *filter(None, [told["capacity"]["num_hosted_bytes"]])]

    await until_none(held, HEARD_SECONDS)


async def wait_all_ready(mesh: Mesh) -> None:
    """Until the home is heard of again, and everybody serves."""

    async def absent() -> list[object]:
        ready = {one["name"] for one in await asyncio.to_thread(mesh.services) if one["state"] == "ready"}
        return list({HOME, HOST, "prefill-0"} - ready)

    await until_none(absent, HEARD_SECONDS)


@pytest.mark.parametrize("has_switched", [False, True], ids=["while it copies", "with its layers away"])
async def test_a_home_that_stood_still_longer_than_its_lease_serves_on(
    mesh: Mesh, moves: Moves, answers: list[str], has_switched: bool
) -> None:
    """Its host keeps nothing for it, its streams go on elsewhere, and it has everything when it wakes."""
    home = mesh.service(HOME)
    async with load_on(mesh, prompts(), answers, ANSWER_TOKENS, NUM_STREAMS) as load:
        move_id = await moves.begin(HOME, host=HOST, **LAYERS)
        await wait_phase(moves, move_id, "done" if has_switched else "copying")
        os.kill(home["pid"], signal.SIGSTOP)
        try:
            await wait_freed(moves)
            await load.next_right()
        finally:
            os.kill(home["pid"], signal.SIGCONT)
        await wait_all_ready(mesh)
        await moves.wait_all_home()
        await wait_told(moves, move_id, "" if has_switched else "was lost")
        await moves.away_and_back(HOME, host=HOST, **SMALL)
    assert (load.refused, load.errors) == ([], [])
    assert mesh.service(HOME)["incarnation"] == home["incarnation"]
    await moves.wait_all_home()
    await asyncio.to_thread(mesh.wait_idle)


async def test_ctrl_c_in_the_middle_of_a_move_ends_everything_in_order(
    mesh: Mesh, moves: Moves, answers: list[str]
) -> None:
    pids = [service["pid"] for service in mesh.services()] + [child_of(mesh.process.pid, "nats-server")]
    async with load_on(mesh, prompts(), answers, ANSWER_TOKENS, NUM_STREAMS) as load:
        await moves.done(HOME, host=HOST, **SMALL)
        await wait_phase(moves, await moves.begin(HOST, host=HOME, **LAYERS), "copying")
        load.is_over = True
        mesh.process.send_signal(signal.SIGINT)
    assert (load.refused, load.errors) == ([], []), "streams under way come to their end"
    assert load.num_right >= NUM_STREAMS
    assert await asyncio.to_thread(mesh.process.wait, END_SECONDS) == 0
    until(
        lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids),
        timeout_seconds=5,
        what="no process is left",
    )
    logs = [mesh.output, *(mesh.state_dir / "logs").glob("*.log")]
    said = "\n".join(path.read_text(errors="replace") for path in logs)
    assert "Traceback" not in said
    assert "step_timed_out" not in said
    assert "did not end in time" not in said
