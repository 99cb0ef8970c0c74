"""Coordinators on the in-memory bus, and workers that are only told of, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from balancing_plant import MEMORY_BYTES, NUM_BLOCKS, SHAPE
from hosted import Hosted
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.errors import BusError
from libs.bus.message import Request
from libs.bus.messages.migration import (
    CancelMigration,
    ChangeRole,
    DenialReason,
    MigrationAccepted,
    MigrationDenied,
    MigrationRecord,
    MigrationUpdate,
    PlacementUpdate,
    RoleAccepted,
    StartMigration,
)
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.placement.migration import MigrationPhase, is_over
from libs.placement.module import Module, heads_of
from libs.placement.placement import PlacedModule, all_at_owner
from libs.placement.role import Role
from libs.runtime.identity import new_identity
from services.migration_coordinator.service import CoordinatorService
from services.migration_coordinator.settings import CoordinatorSettings

UNIX_START = 1_700_000_000.0
ONE_HEAD = heads_of(0, 30, (2,))


def unix_now() -> float:
    return UNIX_START + asyncio.get_running_loop().time()


class ToldWorker:
    """Reports four times a second and tells its placement once a second; takes orders as it is told to."""

    def __init__(self, scene: "Scene", name: str, kind: ServiceKind, **facts: Any) -> None:
        self.scene, self.name = scene, name
        self.bus = MemoryBus(scene.broker)
        self.incarnation = f"{name}-i"
        self.kind = kind
        self.load: dict[str, Any] = {}
        self.facts = facts
        self.placement = all_at_owner(self.incarnation, SHAPE.num_layers, SHAPE.num_kv_heads)
        self.moves: dict[str, MigrationRecord] = {}
        self.started: list[StartMigration] = []
        self.abandoned: list[str] = []
        self.roles = list[Role]()
        self.denial: MigrationDenied | None = None
        self.hangs = self.breaks = False
        self.forgets = False
        """Accepts moves and tells of none."""
        self._sequence = 0
        self.task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self.bus.serve(StartMigration, self._start, at=self.incarnation)
        await self.bus.serve(CancelMigration, self._abandon, at=self.incarnation)
        await self.bus.serve(ChangeRole, self._change_role, at=self.incarnation)
        self.task = asyncio.create_task(self._tell_for_ever())

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None
        await self.bus.close()

    async def _tell_for_ever(self) -> None:
        while True:
            with suppress(BusError):
                await self.tell()
            await asyncio.sleep(0.25)

    async def tell(self) -> None:
        self._sequence += 1
        presence = Presence(
            **{
                "kind": self.kind,
                "name": self.name,
                "incarnation": self.incarnation,
                "state": ServiceState.READY,
                "model_fingerprint": "model",
                "max_model_len": 256,
                "hosting_address": "memory://here",
                "num_layers": SHAPE.num_layers,
                "num_heads": SHAPE.num_heads,
                "num_kv_heads": SHAPE.num_kv_heads,
                "head_dim": SHAPE.head_dim,
                "hidden_size": SHAPE.hidden_size,
                "element_bytes": SHAPE.element_bytes,
                "layer_weight_bytes": SHAPE.layer_weight_bytes,
                "layer_memory_bytes": SHAPE.layer_memory_bytes,
                "block_bytes": SHAPE.block_bytes,
                "kv_memory_bytes": MEMORY_BYTES,
                "device_share": 0.25,
                **self.facts,
            }
        )
        await self.bus.put_presence(self.incarnation, msgspec.msgpack.encode(presence))
        load = WorkerLoad(**{"num_blocks": NUM_BLOCKS, "block_size": SHAPE.block_size, **self.load})
        report = LoadReport(kind=self.kind, incarnation=self.incarnation, sequence=self._sequence, load=load)
        await self.bus.publish(report)
        moves = () if self.forgets else tuple(self.moves.values())
        await self.bus.publish(PlacementUpdate(placement=self.placement, moves=moves))

    async def _start(self, start: StartMigration) -> MigrationAccepted | MigrationDenied:
        self.started.append(start)
        if self.hangs:
            await asyncio.Event().wait()
        if self.breaks:
            raise RuntimeError("broken")
        if self.denial is not None:
            return self.denial
        if start.expected_epoch != self.placement.epoch:
            return MigrationDenied(
                reason=DenialReason.STALE_EPOCH, detail="stale", epoch=self.placement.epoch
            )
        returned = self.placement.get(start.returned_move_id)
        module = start.module or (returned.module if returned else None)
        assert module is not None
        self.moves[start.move_id] = MigrationRecord(
            move_id=start.move_id,
            instance=self.incarnation,
            instance_name=self.name,
            host=start.host or (returned.worker if returned else ""),
            module=module,
            is_return=returned is not None,
            returned_move_id=start.returned_move_id,
            phase=MigrationPhase.COPYING,
            expected_epoch=start.expected_epoch,
            epoch=self.placement.epoch,
            reason=start.reason,
            started_unix_seconds=unix_now(),
        )
        await self.bus.publish(MigrationUpdate(record=self.moves[start.move_id]))
        return MigrationAccepted(move_id=start.move_id, epoch=self.placement.epoch)

    async def _abandon(self, abandon: CancelMigration) -> MigrationAccepted | MigrationDenied:
        self.abandoned.append(abandon.move_id)
        if self.hangs:
            await asyncio.Event().wait()
        if self.breaks:
            raise RuntimeError("broken")
        record = self.moves.get(abandon.move_id)
        if record is None or is_over(record.phase):
            return MigrationDenied(reason=DenialReason.NOT_FOUND, detail="no such move is under way")
        await self.end(abandon.move_id, MigrationPhase.FAILED)
        return MigrationAccepted(move_id=abandon.move_id, epoch=self.placement.epoch)

    async def _change_role(self, order: ChangeRole) -> RoleAccepted:
        self.roles.append(order.role)
        return RoleAccepted(role=order.role)

    async def end(self, move_id: str, phase: MigrationPhase = MigrationPhase.DONE) -> None:
        """The move comes to its end."""
        record = self.moves[move_id]
        if phase is MigrationPhase.DONE:
            self.placement = (
                self.placement.without(record.returned_move_id)
                if record.is_return
                else self.placement.with_module(
                    PlacedModule(
                        move_id=move_id, module=record.module, worker=record.host, num_blocks=NUM_BLOCKS
                    )
                )
            )
        self.moves[move_id] = msgspec.structs.replace(
            record, phase=phase, epoch=self.placement.epoch, ended_unix_seconds=unix_now()
        )
        await self.bus.publish(MigrationUpdate(record=self.moves[move_id]))
        await self.tell()


class Coordinator(Hosted):
    """One coordinator with its life."""

    def __init__(self, scene: "Scene", name: str, **settings: Any) -> None:
        made = CoordinatorSettings(name=name, **settings)
        identity = new_identity(ServiceKind.MIGRATION_COORDINATOR, name)
        super().__init__(CoordinatorService(made, clock=unix_now), identity, MemoryBus(scene.broker))
        self.begin(made)

    @property
    def leads(self) -> bool:
        return self.runtime is not None and self.gauge("kvmesh_coordinator_is_leader") == 1

    async def kill(self) -> None:
        """No good-bye; the lease stays until it runs out."""
        self.bus.disconnect()
        await self.end(drained=False)


class Scene:
    """A broker in virtual time, and an asker."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(clock=asyncio.get_running_loop().time)
        self.asker = MemoryBus(self.broker)
        self.workers: dict[str, ToldWorker] = {}
        self.coordinators: list[Coordinator] = []

    async def worker(
        self, name: str, kind: ServiceKind = ServiceKind.DECODE_WORKER, **facts: Any
    ) -> ToldWorker:
        self.workers[name] = ToldWorker(self, name, kind, **facts)
        await self.workers[name].open()
        return self.workers[name]

    async def coordinator(self, name: str = "coordinator-0", **settings: Any) -> Coordinator:
        self.coordinators.append(Coordinator(self, name, **settings))
        await self.until(lambda: self.coordinators[-1].runtime is not None)
        return self.coordinators[-1]

    async def pair(self, **settings: Any) -> tuple[ToldWorker, ToldWorker, Coordinator]:
        """Two workers and a coordinator that leads and knows them."""
        home, host = await self.worker("decode-0"), await self.worker("decode-1")
        coordinator = await self.coordinator(**{"automatic": False, **settings})
        await self.until(lambda: coordinator.leads)
        await asyncio.sleep(1.5)
        return home, host, coordinator

    def ask(self, question: Request[Any]) -> Awaitable[Any]:
        return self.asker.request(question, timeout_seconds=10)

    async def order_by_hand(self, owner: ToldWorker, host: ToldWorker) -> str:
        """As a gateway does; returns the id of the move."""
        order = StartMigration(
            move_id=f"manual-{len(owner.started)}",
            module=ONE_HEAD,
            host=host.incarnation,
            expected_epoch=owner.placement.epoch,
            deadline_seconds=60.0,
        )
        answer = await self.asker.request(order, to=owner.incarnation, timeout_seconds=10)
        assert isinstance(answer, MigrationAccepted)
        return answer.move_id

    def move(self, move_id: str) -> MigrationRecord | None:
        """As the leader knows it."""
        (leader,) = (one for one in self.coordinators if one.is_alive and one.leads)
        return leader.service._migrations.get(move_id)

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - virtual time, and states that announce nothing
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for coordinator in self.coordinators:
            if coordinator.is_alive:
                await coordinator.end(drained=False)
        for worker in self.workers.values():
            await worker.kill()
        await self.asker.close()


@asynccontextmanager
async def coordinator_scene() -> AsyncGenerator[Scene]:
    scene = Scene()
    try:
        yield scene
    finally:
        await scene.close()


def module_of(start: StartMigration) -> Module:
    assert start.module is not None
    return start.module
