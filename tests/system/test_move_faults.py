"""kill -9 in every phase of a move, under load: each stream ends in the right text or one error, nothing of
the move is left, and the next move works."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from mesh_moves import Moves, bus_of, load_on, moves_of, until_none

from black_box import Mesh, child_of
from libs.bus.messages.migration import MigrationUpdate
from libs.placement.migration import MigrationPhase

pytestmark = pytest.mark.system
MESH = "moving"

NUM_STREAMS = 8
ANSWER_TOKENS = 48
HEAL_SECONDS = 60.0
PHASE_SECONDS = 30.0
FROZEN_SECONDS = 0.5

LAYERS = {"layers": [2, 6], "kind": "offload"}
WEIGHTS = {"layers": [5, 7], "kind": "migrate"}
HEADS = {"layers": [0, 4], "kv_heads": [0, 2]}
MANY_HEADS = {"kv_heads": [0, 2]}
SMALL = {"layers": [1, 2], "kv_heads": [1]}

NATS, COORDINATOR = "nats", "coordinator-0"


class Row(NamedTuple):
    """Who dies when which move enters which phase. A module comes home where `comes_home`."""

    phase: MigrationPhase
    victim: str
    home: str
    host: str
    module: dict[str, Any]
    comes_home: bool = False

    @property
    def name(self) -> str:
        role = {self.home: "home", self.host: "host"}.get(self.victim, self.victim)
        return f"{self.phase.value}{'-home-again' if self.comes_home else ''}-{role}"

    @property
    def needs_both(self) -> bool:
        """The move cannot go on without the victim."""
        is_early = self.phase in (
            MigrationPhase.RESERVING,
            MigrationPhase.COPYING,
            MigrationPhase.CATCHING_UP,
        )
        return is_early and self.victim in (self.home, self.host)


D0, D1, P0 = "decode-0", "decode-1", "prefill-0"
ROWS = [
    Row(MigrationPhase.RESERVING, D1, D0, D1, HEADS),
    Row(MigrationPhase.COPYING, D0, D0, D1, LAYERS),
    Row(MigrationPhase.COPYING, P0, P0, D1, MANY_HEADS),
    Row(MigrationPhase.CATCHING_UP, NATS, D1, D0, WEIGHTS),
    Row(MigrationPhase.SWITCHING, D1, D1, D0, HEADS),
    Row(MigrationPhase.RELEASING, COORDINATOR, D0, D1, HEADS, comes_home=True),
    Row(MigrationPhase.DONE, D1, D0, D1, WEIGHTS),
]
"""A kill in each phase, each kind of victim at least once; every pair of both is in the component tests."""


def prompts() -> list[str]:
    river = "today I walked along the river and saw many birds. "
    return [f"Letter {20 + i}. Dear friend, " + river * (4 + 4 * (i % 5)) for i in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def answers(reference: Callable[[list[str], int], list[str]]) -> list[str]:
    return reference(prompts(), ANSWER_TOKENS)


@pytest.fixture
async def moves(mesh: Mesh) -> AsyncIterator[Moves]:
    async with moves_of(mesh) as moves:
        moves.patience_seconds = 10.0
        yield moves


def pid_of(mesh: Mesh, name: str) -> int:
    return child_of(mesh.process.pid, "nats-server") if name == NATS else int(mesh.service(name)["pid"])


class Killing:
    """Hears what workers tell of moves; kills the victim as soon as a move enters the phase of the row.

    The host stands still from just before (or, to meet it in `reserving`, from before the order) until
    shortly after: the move cannot leave the phase meanwhile, if it needs the host for that.
    """

    def __init__(self, mesh: Mesh, row: Row) -> None:
        self._row = row
        self._victim, self._host = pid_of(mesh, row.victim), pid_of(mesh, row.host)
        self._is_frozen = False
        self.move_id = ""
        self._entered: set[str] = set()
        self.is_done = asyncio.Event()

    def freeze(self) -> None:
        self._is_frozen = True
        os.kill(self._host, signal.SIGSTOP)

    def thaw(self) -> None:
        if self._is_frozen and not (self.is_done.is_set() and self._row.victim == self._row.host):
            os.kill(self._host, signal.SIGCONT)
        self._is_frozen = False

    def ordered(self, move_id: str) -> None:
        self.move_id = move_id
        self._look()

    def hear(self, told: MigrationUpdate) -> None:
        if told.record.phase is self._row.phase:
            self._entered.add(told.record.move_id)
            self._look()

    def _look(self) -> None:
        if self.move_id in self._entered and not self.is_done.is_set():
            if (
                self._row.phase in (MigrationPhase.SWITCHING, MigrationPhase.RELEASING)
                and not self._is_frozen
            ):
                self.freeze()
            os.kill(self._victim, signal.SIGKILL)
            self.is_done.set()


@asynccontextmanager
async def healing(mesh: Mesh, moves: Moves, victim: str) -> AsyncIterator[None]:
    """At the end everybody serves again, the victim as a new one."""
    before = {service["name"]: service["incarnation"] for service in mesh.services()}
    yield

    def ready() -> dict[str, str]:
        return {s["name"]: s["incarnation"] for s in mesh.services() if s["state"] == "ready"}

    async def not_healed() -> list[object]:
        try:
            now = await asyncio.to_thread(ready)
            is_ready = await asyncio.to_thread(mesh.status_of, "/ready") == 200
            leads = await moves.is_led()
        except OSError as error:
            return [str(error)]
        wrong = [n for n, old in before.items() if n not in now or (now[n] == old) is (n == victim)]
        return [*wrong, *([] if is_ready else ["not ready"]), *([] if leads else ["nobody leads"])]

    await until_none(not_healed, HEAL_SECONDS)


async def capacities(moves: Moves) -> dict[str, int]:
    return {name: told["capacity"]["num_blocks"] for name, told in (await moves.placement()).items()}


async def wait_capacities(moves: Moves, expected: dict[str, int]) -> None:
    async def wrong() -> list[object]:
        return list((await capacities(moves)).items() ^ expected.items())

    await until_none(wrong, PHASE_SECONDS)


def check_outcome(row: Row, record: dict[str, Any]) -> None:
    """A move outlives coordinator and broker; before the switch it needs both of its workers."""
    if row.victim in (NATS, COORDINATOR):
        assert record["phase"] == "done", record
    elif row.needs_both:
        assert (record["phase"], record["error"] != "") == ("failed", True), record
    elif row.phase is MigrationPhase.DONE:
        assert record["phase"] == "done", record


def check_epoch(row: Row, record: dict[str, Any], before: int, after: int) -> None:
    """Every change of a placement has a new epoch, also that a host was lost, and nothing else has."""
    if row.victim == row.home:
        assert after == 0, "a new instance is all at home"
    elif record["phase"] == "failed" and not row.comes_home:
        assert after == before
    else:
        assert after > before


@pytest.mark.parametrize("row", ROWS, ids=[row.name + f"-{row.home[0]}" for row in ROWS])
async def test_kill_in_each_phase(mesh: Mesh, moves: Moves, answers: list[str], row: Row) -> None:
    capacities_before = await capacities(moves)
    async with (
        healing(mesh, moves, row.victim),
        load_on(mesh, prompts(), answers, ANSWER_TOKENS, NUM_STREAMS) as load,
        bus_of(mesh) as bus,
    ):
        killing = Killing(mesh, row)
        await bus.subscribe(MigrationUpdate, killing.hear)
        order: dict[str, Any] = {"host": row.host, **row.module}
        if row.comes_home:
            order = {"return_of": (await moves.done(row.home, **order))["id"]}
        epoch = await moves.epoch(row.home)
        if row.phase is MigrationPhase.RESERVING:
            killing.freeze()
        try:
            killing.ordered(await moves.begin(row.home, **order))
            async with asyncio.timeout(PHASE_SECONDS):
                await killing.is_done.wait()
            await asyncio.sleep(FROZEN_SECONDS)
        finally:
            killing.thaw()
        await load.next_right(NUM_STREAMS)
    print(f"{load.num_right} right, {len(load.errors)} errors, {len(load.refused)} refused")
    assert row.victim in (NATS, P0) or load.refused == [], "there is another of its kind"
    assert len(load.errors) <= (0 if row.victim == COORDINATOR else NUM_STREAMS // 4), load.errors
    await moves.wait_settled()
    record = await moves.record(killing.move_id)
    check_outcome(row, record)
    check_epoch(row, record, epoch, await moves.epoch(row.home))
    await moves.bring_home()
    await moves.wait_all_home()
    await asyncio.to_thread(mesh.wait_idle)
    await moves.away_and_back(row.home, host=row.host, **SMALL)
    await moves.wait_all_home()
    await wait_capacities(moves, capacities_before)


async def test_a_move_that_is_cancelled_leaves_nothing_behind(
    mesh: Mesh, moves: Moves, answers: list[str]
) -> None:
    async with load_on(mesh, prompts(), answers, ANSWER_TOKENS, NUM_STREAMS) as load:
        epoch = await moves.epoch(D0)
        move_id = await moves.begin(D0, host=D1, layers=[0, 6], kind="migrate")
        cancelled = await moves.cancel(move_id)
        assert cancelled.status_code == 202, cancelled.text
        record = await moves.wait_over(move_id)
        assert (record["phase"], record["epoch"]) == ("failed", epoch)
        assert "cancelled" in record["error"]
        again = await moves.cancel(move_id)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "cannot_cancel")
        await load.next_right()
    assert (load.refused, load.errors) == ([], [])
    await moves.wait_all_home()
    await asyncio.to_thread(mesh.wait_idle)
