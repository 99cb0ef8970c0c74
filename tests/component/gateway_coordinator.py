"""A leading coordinator and owners that answer what a test says, and what workers tell of themselves."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from libs.balancing.view import CandidateReport, DeviceSnapshot, RoundReport
from libs.bus.bus import Bus
from libs.bus.messages.migration import (
    AbandonMove,
    ExplainRounds,
    MoveAccepted,
    MoveDenied,
    MoveRecord,
    MoveTold,
    PlacementTold,
    Rounds,
    StartMove,
)
from libs.bus.subscriptions import Subscription
from libs.placement.module import Module, heads_of, whole_layers
from libs.placement.phases import MovePhase
from libs.placement.placement import Hosted, Placed, Placement, all_home

NUM_LAYERS, NUM_HEADS = 30, 3
DECODE, PREFILL = "decode-0-i", "prefill-0-i"
"""The incarnations of the workers that a gateway under test finds."""


@dataclass
class Coordinator:
    """Explains what a test says."""

    bus: Bus
    rounds: list[RoundReport] = field(default_factory=list)
    asked: list[ExplainRounds] = field(default_factory=list)
    served: list[Subscription] = field(default_factory=list)

    async def open(self) -> None:
        self.served = [await self.bus.serve(ExplainRounds, self._explain)]

    async def leave(self) -> None:
        for served in self.served:
            await served.close()

    async def _explain(self, explain: ExplainRounds) -> Rounds:
        if explain.num_rounds != 1:  # one round is what gateways look at by themselves
            self.asked.append(explain)
        rounds = tuple(self.rounds[: explain.num_rounds])
        return Rounds(leader="coordinator-0", is_automatic=True, rounds=rounds)


@dataclass
class Owners:
    """Workers as far as they take orders to move modules: what they answer, and tell of what they begin."""

    bus: Bus
    answer: MoveDenied | None = None
    begins: MoveRecord | None = None
    """What is told of each move that begins, with its id."""
    asked: list[StartMove | AbandonMove] = field(default_factory=list)
    hangs: bool = False
    breaks: bool = False
    served: list[Subscription] = field(default_factory=list)

    async def open(self) -> None:
        for worker in (DECODE, PREFILL):
            self.served.append(await self.bus.serve(StartMove, self._start, at=worker))
            self.served.append(await self.bus.serve(AbandonMove, self._abandon, at=worker))

    async def leave(self) -> None:
        for served in self.served:
            await served.close()

    async def tell(self, *records: MoveRecord) -> None:
        for one in records:
            await self.bus.publish(MoveTold(move=one))

    async def _start(self, order: StartMove) -> MoveAccepted | MoveDenied:
        return await self._follow(order, self.begins)

    async def _abandon(self, order: AbandonMove) -> MoveAccepted | MoveDenied:
        return await self._follow(order, None)

    async def _follow(
        self, order: StartMove | AbandonMove, begins: MoveRecord | None
    ) -> MoveAccepted | MoveDenied:
        self.asked.append(order)
        if self.hangs:
            await asyncio.Event().wait()
        if self.breaks:
            raise RuntimeError("broken")
        if self.answer is None and begins is not None:
            await self.tell(msgspec.structs.replace(begins, move_id=order.move_id))
        return self.answer or MoveAccepted(move_id=order.move_id, epoch=0)


def order(**facts: Any) -> StartMove:
    """As a gateway gives it, but for its id."""
    known: dict[str, Any] = {
        "host": PREFILL,
        "expected_epoch": 0,
        "deadline_seconds": 60.0,
        "reason": "manual",
    }
    return StartMove(move_id="", **{**known, **facts})


def without_ids(asked: Iterable[StartMove | AbandonMove]) -> list[StartMove | AbandonMove]:
    return [msgspec.structs.replace(one, move_id="") for one in asked]


def placed(module: Module, worker: str = PREFILL, move_id: str = "m1", **facts: Any) -> Placed:
    return Placed(move_id=move_id, module=module, worker=worker, **facts)


def at_home(home: str = DECODE) -> Placement:
    return all_home(home, NUM_LAYERS, NUM_HEADS)


def told(placement: Placement, **facts: Any) -> PlacementTold:
    return PlacementTold(placement=placement, **facts)


def hosted(module: Module, home: str = DECODE, move_id: str = "m1") -> Hosted:
    return Hosted(move_id=move_id, home=home, module=module, num_blocks=100, num_bytes=64 << 20)


def record(phase: MovePhase = MovePhase.COPYING, move_id: str = "m1", **facts: Any) -> MoveRecord:
    known: dict[str, Any] = {
        "instance": DECODE,
        "host": PREFILL,
        "module": whole_layers(20, 30),
        "expected_epoch": 0,
        "epoch": 0,
        "started_unix_seconds": 1000.0,
    }
    return MoveRecord(move_id=move_id, phase=phase, **{**known, **facts})


def done(**facts: Any) -> MoveRecord:
    figures: dict[str, Any] = {
        "epoch": 1,
        "with_weights": True,
        "ended_unix_seconds": 1001.5,
        "phase_seconds": {"reserving": 0.02, "copying": 0.9, "catching_up": 0.3, "switching": 0.01},
        "num_kv_bytes": 12 << 20,
        "num_weight_bytes": 70 << 20,
        "num_rounds": 2,
        "pause_seconds": 0.0083,
        "num_blocks_before": 800,
        "num_blocks_after": 1200,
    }
    return record(MovePhase.DONE, **{**figures, **facts})


def seen(number: int = 1, **facts: Any) -> RoundReport:
    devices = (
        DeviceSnapshot(
            worker=DECODE, name="decode-0", role="decode", compute=0.9, memory=0.8, queue=0.5, utilization=0.8
        ),
        DeviceSnapshot(
            worker=PREFILL,
            name="prefill-0",
            role="prefill",
            compute=0.1,
            memory=0.2,
            queue=0,
            utilization=0.1,
        ),
    )
    known: dict[str, Any] = {
        "unix_seconds": 1000.0 + number,
        "devices": devices,
        "gap": 0.7,
        "is_balancing": True,
        "decision": "stayed: nothing is worth its cost",
    }
    return RoundReport(number=number, **{**known, **facts})


def candidate(verdict: str = "taken", **facts: Any) -> CandidateReport:
    known: dict[str, Any] = {
        "instance": DECODE,
        "host": PREFILL,
        "what": "KV heads 1 of layers 0-29",
        "benefit": 0.31,
        "cost": 0.05,
        "move_seconds": 0.4,
        "overhead_seconds": 0.0021,
    }
    return CandidateReport(verdict=verdict, **{**known, **facts})


HEADS_AWAY = at_home().with_module(placed(heads_of(0, NUM_LAYERS, (2,)), move_id="h1"))
LAYERS_AWAY = at_home().with_module(placed(whole_layers(20, 30), has_weights_at_home=False, num_blocks=500))
