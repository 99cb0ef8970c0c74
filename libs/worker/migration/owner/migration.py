"""One migration of one module, to a host or back, from its first phase to its last."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog
from msgspec.structs import replace
from opentelemetry.trace import INVALID_SPAN, Span

from libs.bus.messages.migration import MigrationRecord
from libs.engine.errors import EngineError
from libs.engine.migration.live_migration import LiveMigration
from libs.model.errors import ModelError
from libs.placement.migration import MigrationPhase, can_abandon, is_over
from libs.placement.placement import BadPlacement
from libs.telemetry.traces import end_span, start_span, traceparent_of
from libs.worker.migration.owner.directions import Direction

FEW_BLOCKS = 8
"""So little left is copied in the switch itself."""
MAX_ROUNDS = 8
"""An owner that writes as fast as it copies is not caught up with; the switch copies what is left."""
_SHRINKS_TO = 0.7
"""Another round is worth it while each leaves at most this share of what the one before left."""

_AFTER = {
    MigrationPhase.PLANNED: MigrationPhase.RESERVING,
    MigrationPhase.RESERVING: MigrationPhase.COPYING,
    MigrationPhase.COPYING: MigrationPhase.CATCHING_UP,
    MigrationPhase.SWITCHING: MigrationPhase.RELEASING,
    MigrationPhase.RELEASING: MigrationPhase.DONE,
    MigrationPhase.ROLLING_BACK: MigrationPhase.FAILED,
}


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a move is, once what its phase asks for was done."""

    phase: MigrationPhase
    trouble: str = ""
    """Why it cannot go on, if it cannot."""
    num_rounds: int = 0
    """That caught up."""
    num_left_blocks: int = 0
    num_left_before: int = 0
    """Before the last round."""


def next_phase(progress: Progress) -> MigrationPhase:
    """The phase to enter; the same one for another round."""
    if progress.trouble and can_abandon(progress.phase):
        return MigrationPhase.ROLLING_BACK
    if progress.phase is MigrationPhase.CATCHING_UP:
        return MigrationPhase.SWITCHING if _is_caught_up(progress) else MigrationPhase.CATCHING_UP
    return _AFTER[progress.phase]


def _is_caught_up(progress: Progress) -> bool:
    is_little = progress.num_left_blocks <= FEW_BLOCKS
    still_shrinks = progress.num_left_blocks <= _SHRINKS_TO * progress.num_left_before
    return is_little or not still_shrinks or progress.num_rounds >= MAX_ROUNDS


PIECE_BYTES = 4 << 20
"""Copied between two steps, at most."""
_PIECES_PER_SECOND = 4
"""At least, however slow: each keeps the engine for a moment only."""


class Pace:
    """Lets bytes through at a rate; 0: as fast as they go."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = time.monotonic()

    @property
    def piece_bytes(self) -> int:
        """To copy at once."""
        if not self._bytes_per_second:
            return PIECE_BYTES
        return max(1, min(PIECE_BYTES, int(self._bytes_per_second / _PIECES_PER_SECOND)))

    async def passed(self, num_bytes: int) -> None:
        """So many went through: returns when more may."""
        if not self._bytes_per_second:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
        await asyncio.sleep(self._free_at - now)


WHY_BROKEN = (EngineError, ModelError, BadPlacement)
"""What a move can fail by; anything else is a fault of this program."""

log = structlog.get_logger()


class Migration:
    """Runs once. `on_change` hears the record at every phase."""

    def __init__(
        self,
        record: MigrationRecord,
        engine: LiveMigration,
        direction: Direction,
        pace: Pace,
        on_change: Callable[[MigrationRecord], None],
        *,
        module_move_id: str,
        block_bytes: int,
        deadline_seconds: float,
    ) -> None:
        self.record = record
        self._engine, self._direction, self._pace, self._on_change = engine, direction, pace, on_change
        self._module_move_id, self._block_bytes = module_move_id, block_bytes
        self._ends_at = asyncio.get_running_loop().time() + deadline_seconds
        self._given_up = asyncio.Event()
        self._is_decided = asyncio.Event()
        self._bound: asyncio.Timeout | None = None
        self._progress = Progress(phase=record.phase)
        self._entered_at = time.monotonic()
        self._span: Span = INVALID_SPAN
        self._phase_span: Span = INVALID_SPAN

    def abandon(self, why: str) -> bool:
        """Roll back, if it has not switched; False where it has."""
        if not can_abandon(self.record.phase):
            return False
        self._fail(why)
        self._given_up.set()
        if self._bound is not None and not self._bound.expired():  # a second one finds it ending already
            self._bound.reschedule(asyncio.get_running_loop().time())
        return True

    async def is_rolled_back(self) -> bool:
        """After `abandon`: whether it is. A switch that the engine had begun by then goes through; what it
        came to is waited for."""
        if self.record.phase is MigrationPhase.SWITCHING:
            await self._is_decided.wait()
        return self.record.phase not in (MigrationPhase.RELEASING, MigrationPhase.DONE)

    async def run(self) -> None:
        """Through all phases to `done` or `failed`."""
        record = self.record
        self._span = start_span(
            "move", move_id=record.move_id, host=record.host_name, is_return=record.is_return
        )
        self._on_change(record)
        try:
            while not is_over(self.record.phase):
                self._enter(next_phase(self._progress))
                await self._do(self.record.phase)
        finally:
            self._is_decided.set()  # also where it was cut off: nobody waits for ever
            end_span(self._phase_span)
            end_span(self._span, self.record.error)

    async def _do(self, phase: MigrationPhase) -> None:
        act = {
            MigrationPhase.RESERVING: self._direction.reserve,
            MigrationPhase.COPYING: self._begin,
            MigrationPhase.CATCHING_UP: self._round,
            MigrationPhase.SWITCHING: self._switch,
            MigrationPhase.RELEASING: self._direction.release,
            MigrationPhase.ROLLING_BACK: self._direction.roll_back,
        }.get(phase)
        if act is None:
            return
        try:
            if can_abandon(phase) and phase is not MigrationPhase.SWITCHING:
                async with asyncio.timeout_at(self._ends_at) as self._bound:
                    await act()
            else:
                await act()
        except TimeoutError:
            self._fail("it had not switched by its deadline")
        except WHY_BROKEN as error:
            self._fail(str(error))
        finally:
            self._bound = None

    async def _begin(self) -> None:
        self._expect(
            self._engine.num_total_blocks - self._engine.num_free_blocks
        )  # a guess until it has begun
        num_left = await self._direction.begin(self._count_weights)
        self._expect(num_left)
        self._progress = replace(self._progress, num_left_blocks=num_left)
        await self._copy()

    async def _round(self) -> None:
        num_rounds = self._progress.num_rounds + 1
        self._progress = replace(self._progress, num_rounds=num_rounds)
        self.record = replace(self.record, num_rounds=num_rounds)
        await self._copy()

    async def _copy(self) -> None:
        """As much as is left now; what is written meanwhile is left to the next round."""
        num_left = num_before = self._progress.num_left_blocks
        num_bytes = 0
        while num_left and num_bytes < num_before * self._block_bytes:
            piece = await self._engine.copy_some(self._module_move_id, self._pace.piece_bytes)
            await self._direction.settle()  # no more is under way than the host takes
            num_left, num_bytes = piece.num_left_blocks, num_bytes + piece.num_copied_bytes
            await self._count_kv(piece.num_copied_bytes)
            self._expect(num_left)
            if not piece.num_copied_bytes:
                break
        self._progress = replace(self._progress, num_left_blocks=num_left, num_left_before=num_before)

    async def _switch(self) -> None:
        """Not cut off: it is over soon, or waits, and then the engine is told to give it up."""
        switching = asyncio.ensure_future(self._engine.switch(self._module_move_id))
        given_up = asyncio.ensure_future(self._given_up.wait())
        try:
            seconds_left = self._ends_at - asyncio.get_running_loop().time()
            await asyncio.wait(
                {switching, given_up}, timeout=max(0.0, seconds_left), return_when=asyncio.FIRST_COMPLETED
            )
            if not switching.done():
                await self._engine.cancel_move(self._module_move_id)
            switched = await switching
        finally:
            given_up.cancel()
            switching.cancel()
        self.record = replace(
            self.record,
            num_kv_bytes=switched.num_bytes,
            num_total_bytes=self.record.num_weight_bytes + switched.num_bytes,
            epoch=self._engine.placement.epoch,
            pause_seconds=switched.pause_seconds,
            num_blocks_after=switched.num_blocks_after,
            error="",
        )
        self._progress = replace(self._progress, trouble="")

    def _expect(self, num_left_blocks: int) -> None:
        num_kv_bytes = self.record.num_kv_bytes + num_left_blocks * self._block_bytes
        self.record = replace(self.record, num_total_bytes=self._direction.num_weight_bytes + num_kv_bytes)

    async def _count_kv(self, num_bytes: int) -> None:
        self.record = replace(self.record, num_kv_bytes=self.record.num_kv_bytes + num_bytes)
        await self._pace.passed(num_bytes)

    async def _count_weights(self, num_bytes: int) -> None:
        self.record = replace(self.record, num_weight_bytes=self.record.num_weight_bytes + num_bytes)
        await self._pace.passed(num_bytes)

    def _fail(self, why: str) -> None:
        """The first reason counts. People know hosts by their names, Links by incarnations."""
        if not self._progress.trouble:
            why = why.replace(self.record.host, self.record.host_name) if self.record.host_name else why
            self._progress = replace(self._progress, trouble=why)
            self.record = replace(self.record, error=why)

    def _enter(self, phase: MigrationPhase) -> None:
        before, now = self.record.phase, time.monotonic()
        if phase is before:
            return
        seconds = dict(self.record.phase_seconds)
        seconds[before.value] = seconds.get(before.value, 0.0) + now - self._entered_at
        self._entered_at = now
        end_span(self._phase_span, self._progress.trouble)
        ended = time.time() if is_over(phase) else 0.0
        if not ended:
            self._phase_span = start_span(f"move.{phase.value}", traceparent_of(self._span))
        if phase is MigrationPhase.FAILED:
            self.record = replace(self.record, num_blocks_after=self._engine.num_total_blocks)
        self._progress = replace(self._progress, phase=phase)
        self.record = replace(self.record, phase=phase, phase_seconds=seconds, ended_unix_seconds=ended)
        if not can_abandon(phase):
            self._is_decided.set()
        log.info(
            "move_entered_phase", move_id=self.record.move_id, phase=phase.value, error=self.record.error
        )
        self._on_change(self.record)
