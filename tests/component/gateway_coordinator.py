"""A leading coordinator and owners that answer what a test says, and what workers tell of themselves."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from libs.balancing.view import CandidateReport, DeviceSnapshot, RoundReport
from libs.bus.bus import Bus
from libs.bus.messages.migration import (
    CancelMigration,
    ExplainRounds,
    MigrationAccepted,
    MigrationDenied,
    MigrationRecord,
    MigrationUpdate,
    PlacementUpdate,
    Rounds,
    StartMigration,
)
from libs.bus.subscriptions import Subscription
from libs.placement.migration import MigrationPhase
from libs.placement.module import Module, heads_of, whole_layers
from libs.placement.placement import HostedModuleStatus, PlacedModule, Placement, all_at_owner

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
    answer: MigrationDenied | None = None
    begins: MigrationRecord | None = None
    """What is told of each move that begins, with its id."""
    asked: list[StartMigration | CancelMigration] = field(default_factory=list)
    hangs: bool = False
    breaks: bool = False
    served: list[Subscription] = field(default_factory=list)

    async def open(self) -> None:
        for worker in (DECODE, PREFILL):
            self.served.append(await self.bus.serve(StartMigration, self._start, at=worker))
            self.served.append(await self.bus.serve(CancelMigration, self._abandon, at=worker))

    async def leave(self) -> None:
        for served in self.served:
            await served.close()

    async def tell(self, *records: MigrationRecord) -> None:
        for one in records:
            await self.bus.publish(MigrationUpdate(record=one))

    async def _start(self, order: StartMigration) -> MigrationAccepted | MigrationDenied:
        return await self._follow(order, self.begins)

    async def _abandon(self, order: CancelMigration) -> MigrationAccepted | MigrationDenied:
        return await self._follow(order, None)

    async def _follow(
        self, order: StartMigration | CancelMigration, begins: MigrationRecord | None
    ) -> MigrationAccepted | MigrationDenied:
        self.asked.append(order)
        if self.hangs:
            await asyncio.Event().wait()
        if self.breaks:
            raise RuntimeError("broken")
        if self.answer is None and begins is not None:
            await self.tell(msgspec.structs.replace(begins, move_id=order.move_id))
        return self.answer or MigrationAccepted(move_id=order.move_id, epoch=0)


def order(**facts: Any) -> StartMigration:
    """As a gateway gives it, but for its id."""
    known: dict[str, Any] = {
        "host": PREFILL,
        "expected_epoch": 0,
        "deadline_seconds": 60.0,
        "reason": "manual",
    }
    return StartMigration(move_id="", **{**known, **facts})


def without_ids(asked: Iterable[StartMigration | CancelMigration]) -> list[StartMigration | CancelMigration]:
    return [msgspec.structs.replace(one, move_id="") for one in asked]


def placed(module: Module, worker: str = PREFILL, move_id: str = "m1", **facts: Any) -> PlacedModule:
    return PlacedModule(move_id=move_id, module=module, worker=worker, **facts)


def at_home(home: str = DECODE) -> Placement:
    return all_at_owner(home, NUM_LAYERS, NUM_HEADS)


def told(placement: Placement, **facts: Any) -> PlacementUpdate:
    return PlacementUpdate(placement=placement, **facts)


def hosted(module: Module, home: str = DECODE, move_id: str = "m1") -> HostedModuleStatus:
    return HostedModuleStatus(move_id=move_id, owner=home, module=module, num_blocks=100, num_bytes=64 << 20)


def record(
    phase: MigrationPhase = MigrationPhase.COPYING, move_id: str = "m1", **facts: Any
) -> MigrationRecord:
    known: dict[str, Any] = {
        "instance": DECODE,
        "host": PREFILL,
        "module": whole_layers(20, 30),
        "expected_epoch": 0,
        "epoch": 0,
        "started_unix_seconds": 1000.0,
    }
    return MigrationRecord(move_id=move_id, phase=phase, **{**known, **facts})


def done(**facts: Any) -> MigrationRecord:
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
    return record(MigrationPhase.DONE, **{**figures, **facts})


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
LAYERS_AWAY = at_home().with_module(placed(whole_layers(20, 30), has_weights_at_owner=False, num_blocks=500))
