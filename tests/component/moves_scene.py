"""Two workers between which modules move while sequences run, and somebody who orders moves and listens."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from memory_bus import MemoryBus
from workers_gateway import Stream
from workers_mesh import Gateway, Hosted, WorkersMesh, prompt_of, running_mesh
from workers_reference import Reference

from libs.bus.messages.migration import (
    CancelMigration,
    MigrationAccepted,
    MigrationDenied,
    MigrationRecord,
    MigrationUpdate,
    PlacementUpdate,
    StartMigration,
)
from libs.placement.migration import MigrationPhase, is_over
from libs.placement.module import Module
from libs.placement.placement import Placement, all_at_owner

SECONDS = 20.0
HOST_BLOCKS = 600
"""Unless a test says otherwise: room for what leaves a home of 256."""


class MovesScene:
    """`home` is the worker whose sequences run, `host` the other."""

    def __init__(self, mesh: WorkersMesh, gateway: Gateway, home: Hosted, host: Hosted) -> None:
        self.mesh, self.gateway, self.home, self.host = mesh, gateway, home, host
        self.bus = MemoryBus(mesh.broker)
        self.told: dict[str, list[MigrationRecord]] = defaultdict(list)
        self.placements: dict[str, PlacementUpdate] = {}
        self._heard = asyncio.Event()
        self._num_moves = 0

    async def open(self) -> None:
        await self.bus.subscribe(MigrationUpdate, self._hear_move)
        await self.bus.subscribe(PlacementUpdate, self._hear_placement)

    @property
    def placement(self) -> Placement:
        return self.home.service.engine.migrations.placement

    def told_placement(self, worker: Hosted) -> Placement:
        """As everybody was told of it last."""
        told = self.placements.get(worker.incarnation)
        return told.placement if told is not None else all_at_owner("", 1, 1)

    async def start(self, module: Module | None = None, **facts: Any) -> MigrationAccepted | MigrationDenied:
        self._num_moves += 1
        plain: dict[str, Any] = {
            "move_id": f"move-{self._num_moves}",
            "module": module,
            "host": self.host.incarnation if module is not None else "",
            "expected_epoch": self.placement.epoch,
            "deadline_seconds": SECONDS,
        }
        order = StartMigration(**{**plain, **facts})
        return await self.bus.request(order, to=self.home.incarnation, timeout_seconds=5)

    async def move(self, module: Module | None = None, **facts: Any) -> MigrationRecord:
        """Start one and see it to its end."""
        answer = await self.start(module, **facts)
        assert isinstance(answer, MigrationAccepted), answer
        return await self.end(answer.move_id)

    async def away(self, module: Module, **facts: Any) -> MigrationRecord:
        record = await self.move(module, **facts)
        assert record.phase is MigrationPhase.DONE, record
        return record

    async def back(self, returned_move_id: str, **facts: Any) -> MigrationRecord:
        record = await self.move(returned_move_id=returned_move_id, **facts)
        assert record.phase is MigrationPhase.DONE, record
        return record

    async def bring_home(self) -> None:
        """Whatever is away and not lost."""
        for placed in self.placement.placed:
            answer = await self.start(returned_move_id=placed.move_id)
            if isinstance(answer, MigrationAccepted):
                await self.end(answer.move_id)

    async def abandon(self, move_id: str) -> MigrationAccepted | MigrationDenied:
        return await self.bus.request(
            CancelMigration(move_id=move_id), to=self.home.incarnation, timeout_seconds=5
        )

    async def end(self, move_id: str) -> MigrationRecord:
        return await self.until(move_id, *(phase for phase in MigrationPhase if is_over(phase)))

    async def until(self, move_id: str, *phases: MigrationPhase) -> MigrationRecord:
        async with asyncio.timeout(SECONDS):
            while True:
                found = [one for one in self.told[move_id] if one.phase in phases]
                if found:
                    return found[0]
                self._heard.clear()
                await self._heard.wait()

    async def begin(self, num_sequences: int, num_tokens: int, num_prompt_tokens: int = 21) -> list[Stream]:
        """Sequences that run at home."""
        generations = [
            self.gateway.generation(prompt_of(num_prompt_tokens + n, n), max_tokens=num_tokens)
            for n in range(num_sequences)
        ]
        return list(
            await asyncio.gather(
                *(self.gateway.begin(one, decode=self.home.incarnation) for one in generations)
            )
        )

    async def check(self, streams: list[Stream]) -> None:
        """Every stream came to its end with the tokens of one engine alone."""
        async with Reference() as reference:
            for stream in streams:
                await stream.end()
                assert stream.failure is None, stream.detail
                expected = await reference.tokens(stream.generation)
                assert stream.tokens == [token.token_id for token in expected]

    async def until_nothing_is_left(self) -> None:
        """All is home, and nothing of it is anywhere else."""
        await self.mesh.until_idle()
        await self.mesh.until(lambda: not self.placement.placed)
        live = [one for one in (self.home, self.host) if one.task is not None and not one.task.done()]
        await self.mesh.until(
            lambda: all(
                one.gauge("kvmesh_hosted_modules") == 0 == one.gauge("kvmesh_hosted_bytes")
                and one.gauge("kvmesh_num_links") == 0
                for one in live
            )
        )

    def _hear_move(self, told: MigrationUpdate) -> None:
        self.told[told.record.move_id].append(told.record)
        self._heard.set()

    def _hear_placement(self, told: PlacementUpdate) -> None:
        self.placements[told.placement.owner] = told
        self._heard.set()


@asynccontextmanager
async def moving_mesh(*, host: dict[str, Any] | None = None, **home: Any) -> AsyncIterator[MovesScene]:
    async with running_mesh() as mesh:
        gateway = await mesh.gateway()
        scene = MovesScene(
            mesh,
            gateway,
            await mesh.decode("decode-0", role="both", **home),
            await mesh.decode("decode-1", role="both", **({"num_blocks": HOST_BLOCKS} | (host or {}))),
        )
        await scene.open()
        await mesh.until(lambda: scene.host.presence in scene.home.service._roster.all())
        yield scene
        await scene.bus.close()
