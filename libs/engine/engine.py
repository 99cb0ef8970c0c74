"""The engine as services see it: asyncio outside, one thread that owns torch inside.

Life: `start`, then `reserve` → `write_blocks`* → `begin` or `start_decode` per sequence, then `close`.
`close` may also follow a failed `start`. Every sequence that was reserved ends in exactly one of: a
TokenOutput with `finish`, `on_prompt_done`, `on_failed`, or the caller's own `abort`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from kernels.paged_attention.contract import PagedAttention
from libs.cost.load import WorkerLoad
from libs.cost.prefill import DEFAULT_PREFILL_COST, PrefillCost
from libs.engine.core import EngineCore
from libs.engine.errors import EngineClosed, EngineDied, TooManyCommands
from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.hosting import Hosting
from libs.engine.hosting.port import Answer
from libs.engine.meter import Meter
from libs.engine.migration.live_migration import LiveMigration
from libs.engine.migration.migrator import Migrator
from libs.engine.outputs import (
    EngineListener,
    LayerOutput,
    Reservation,
    SequenceFailed,
    TokenOutput,
)
from libs.engine.settings import EngineSettings
from libs.engine.thread import Command, EngineThread, Post
from libs.engine.thread_loop import ThreadLoop
from libs.model.model import Model
from libs.placement.placement import Placement, all_at_owner
from libs.request.generation import Generation


def listener_calls(
    listener: EngineListener, post: Post, aborting: Collection[str], release: Callable[[LayerOutput], None]
) -> list[Callable[[], None]]:
    """In order: KV first, then tokens, ends last. Nothing of what is being aborted, whose KV is released."""
    calls = list[Callable[[], None]]()
    for layer in post.layers:
        if layer.sequence_id in aborting:
            release(layer)
        else:
            calls.append(partial(listener.on_layer, layer))
    if post.tokens:
        tokens: Sequence[TokenOutput] = post.tokens
        if aborting:
            tokens = [token for token in tokens if token.sequence_id not in aborting]
        if tokens:
            calls.append(partial(listener.on_tokens, tokens))
    wanted = (token for token in post.prompts_done if token.sequence_id not in aborting)
    calls += [partial(listener.on_prompt_done, token) for token in wanted]
    failed = (failure for failure in post.failed if failure.sequence_id not in aborting)
    calls += [partial(listener.on_failed, failure) for failure in failed]
    if post.stored or post.removed:
        calls.append(partial(listener.on_names, post.stored, post.removed))
    return calls


__all__ = [
    "Engine",
    "EngineListener",
    "EngineSettings",
    "LayerOutput",
    "Reservation",
    "SequenceFailed",
    "TokenOutput",
]

_MAX_COMMANDS = 16384
"""Commands whose callers wait at once; a step takes them all."""


class Engine:
    """One instance of a model. Methods are called on the event loop that `start` ran on."""

    def __init__(
        self,
        model: Model,
        settings: EngineSettings,
        *,
        home: str = "home",
        attention: PagedAttention | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._listener: EngineListener | None = None
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = Meter()
        self._thread = thread = EngineThread(
            lambda on_layers, between_layers: EngineCore(
                model,
                settings,
                home=home,
                attention=attention,
                clock=clock,
                on_layers=on_layers,
                between_layers=between_layers,
                on_placement=self._post_placement,
                wait=self._wait,
                waiting=self._waiting,
            ),
            self._hear,
            num_threads=settings.num_threads,
        )
        self.hosting = Hosting(self._ask_hosted, thread.call_hosted, thread.hosted)
        """Modules of other instances that run here."""
        at_first = all_at_owner(home, model.config.num_layers, model.config.num_kv_heads)
        self.migrations = LiveMigration(self._ask_migrator, lambda: thread.load, at_first)
        """Live migration of this instance's modules to other workers."""
        self._opened: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._death: Exception | None = None
        self._aborting: Counter[str] = Counter()
        self._is_closing = False

    async def start(self, listener: EngineListener) -> None:
        """Allocates the pool and starts the thread; `listener` hears what it makes from now on. Raises what
        opening the pool raises."""
        if self._loop is not None:
            raise EngineClosed("an engine starts once; make a new one")
        self._listener = listener
        loop = self._loop = asyncio.get_running_loop()
        self._opened, self._ended = loop.create_future(), loop.create_future()
        self._thread.start(loop)
        await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Ends after the running step. What is left fails with ABORTED; the thread is joined. Idempotent."""
        self._is_closing = True
        if self._ended is None:
            self._thread.discard()
            return
        if not self._ended.done():
            self._thread.stop()
            await asyncio.shield(self._ended)
        self._thread.join()

    async def watch(self) -> None:
        """Returns when the engine was closed; raises EngineDied when its thread ended by an error."""
        if self._ended is None:
            raise EngineClosed("the engine was not started")
        await asyncio.shield(self._ended)
        if self._death is not None:
            raise EngineDied(f"the engine's thread ended: {self._death}") from self._death

    async def reserve(
        self, generation: Generation, *, sequence_id: str | None = None, whole_prompt: bool
    ) -> Reservation | None:
        """Holds blocks, or None when there is no room now; ask again later.

        With `whole_prompt` for all its tokens and one more, as KV from outside needs; else for what is
        found by name and one step's worth, the rest being taken as the prompt runs. `sequence_id` is the
        request's if None.

        Raises: PromptTooLong where it can never fit; InvalidSequence, DuplicateSequence.
        """
        name = generation.request_id if sequence_id is None else sequence_id
        try:
            held: Reservation | None = await self._ask(
                lambda core: core.sequences.reserve(generation, name, whole_prompt=whole_prompt)
            )
        except asyncio.CancelledError:
            self.abort(name)  # nobody will know of the reservation
            raise
        return held

    async def write_blocks(
        self, sequence_id: str, layer: int, first_block: int, blocks: torch.Tensor
    ) -> bool:
        """KV `[n, num_kv_heads, 2, block_size, head_dim]` of one layer into reserved blocks.

        False where the sequence does not await KV, or not any more: unknown, over, begun with all its KV, or
        preempted, in which case it is computed instead. Leave `blocks` unchanged until this returns; it is
        taken between two layers, also while a step runs. Raises BadBlocks.
        """
        written: bool = await self._ask(
            lambda core: core.incoming.write(sequence_id, layer, first_block, blocks), between_layers=True
        )
        return written

    async def read_blocks(self, names: Sequence[bytes]) -> torch.Tensor:
        """A copy of the longest prefix of `names` that is here, also of sequences that are over.

        Shape `[n, num_layers, num_kv_heads, 2, block_size, head_dim]`, n <= len(names).
        """
        blocks: torch.Tensor = await self._ask(lambda core: core.read_blocks(names))
        return blocks

    async def held_names(self) -> list[bytes]:
        """Names of all blocks that can be found here: a snapshot, which `on_names` keeps up to date."""
        names: list[bytes] = await self._ask(lambda core: core.sequences.allocator.names())
        return names

    async def begin(
        self,
        sequence_id: str,
        *,
        num_computed_tokens: int,
        hand_over: bool = False,
        first_block: int = 0,
        awaits_kv: bool = False,
    ) -> None:
        """The KV of `num_computed_tokens` is present; the engine computes the rest and goes on.

        With `awaits_kv` it may still be on its way: `write_blocks` takes the blocks that are missing, layers
        in any order, each block once per layer. A layer is computed when it is whole, others run meanwhile.
        Only `abort` and the deadline end the wait for KV that never comes; after `abort` the id is free.

        With `hand_over` it ends after its first token, and KV from block `first_block` on, found or computed,
        goes to `on_layer`. Raises UnknownSequence, WrongState, BadBlocks.
        """
        await self._ask(
            lambda core: core.sequences.begin(
                sequence_id,
                num_computed_tokens=num_computed_tokens,
                hand_over=hand_over,
                first_block=first_block,
                awaits_kv=awaits_kv,
            )
        )

    async def start_decode(self, sequence_id: str, first: TokenOutput) -> None:
        """All KV of its tokens is written and the next token known: decodes from the next step on.

        `first` itself is the caller's to deliver; where it is final, this only frees. Needs `whole_prompt`.
        Raises UnknownSequence, WrongState, InvalidSequence.
        """
        await self._ask(lambda core: core.sequences.start_decode(sequence_id, first))

    def abort(self, sequence_id: str) -> None:
        """Frees everything it holds, from any state; nothing of it is delivered after this. Idempotent."""
        if self._is_open:
            self._aborting[sequence_id] += 1
            self._thread.mailbox.put(
                Command(lambda core: core.sequences.abort(sequence_id), is_abort_of=sequence_id)
            )

    def release_layer(self, output: LayerOutput) -> None:
        """The output was sent, or is not wanted: room for more. Idempotent."""
        if self._is_open:
            self._thread.mailbox.put(Command(lambda core: core.budget.release(output)))

    @property
    def own_loop(self) -> ThreadLoop:
        """The loop that the engine's thread turns when it sleeps, and between layers. What runs there must
        not wait for the engine."""
        return self._thread.own_loop

    def wake(self) -> None:
        """The answer of a host has come; from any thread."""
        self._thread.wake()

    def _wait(self, worker: str, answer: Answer) -> torch.Tensor:
        """On the engine's thread."""
        return self._thread.wait(answer, self._settings.hosting_timeout_seconds, worker)

    def _post_placement(self, placement: Placement, lost: str) -> None:
        """On the engine's thread."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._hear_placement, placement, lost)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return

    def _hear_placement(self, placement: Placement, lost: str) -> None:
        self.migrations.placement_changed(placement, lost)

    def load(self) -> WorkerLoad:
        """What the engine holds and does, as of its last step; `recent_request_ids` is empty."""
        busy_share, tokens_per_second = self._thread.meter.rates()
        return msgspec.structs.replace(
            self._thread.load,
            busy_share=busy_share,
            tokens_per_second=tokens_per_second,
            hosted_busy_share=self._thread.meter.hosted_share(),
            num_hosted_bytes=sum(one.num_bytes for one in self._thread.hosted()),
            away_share=self._waiting.rates()[0],
        )

    def prefill_cost(self) -> PrefillCost:
        """What tokens of a prompt cost, as measured until its last step; a guess before the first one."""
        return self._thread.load.prefill_cost or DEFAULT_PREFILL_COST

    @property
    def num_total_blocks(self) -> int:
        """Blocks of the pool; 0 before `start`."""
        return self._thread.load.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, as of the last step; blocks only kept by name are free."""
        return self._thread.load.num_blocks - self._thread.load.num_used_blocks

    @property
    def _is_open(self) -> bool:
        return self._ended is not None and not self._ended.done()

    async def _ask_hosted(self, act: Callable[[HostedModules], Any]) -> Any:
        return await self._ask(lambda core: act(core.hosted))

    async def _ask_migrator(
        self, act: Callable[[Migrator], Any], in_step: Callable[[Migrator], Any] | None = None
    ) -> Any:
        between = None if in_step is None else lambda core: in_step(core.migrator)
        return await self._ask(lambda core: act(core.migrator), in_step=between)

    async def _ask(
        self,
        act: Callable[[EngineCore], Any],
        *,
        between_layers: bool = False,
        in_step: Callable[[EngineCore], Any] | None = None,
    ) -> Any:
        if self._death is not None:
            raise EngineDied(f"the engine's thread ended: {self._death}")
        if self._is_closing or not self._is_open:
            raise EngineClosed("the engine is not open: start it, and ask before it is closed")
        if len(self._thread.mailbox) >= _MAX_COMMANDS:
            raise TooManyCommands(f"{_MAX_COMMANDS} commands wait already; await their answers first")
        answer = asyncio.get_running_loop().create_future()
        self._thread.mailbox.put(Command(act, answer, between_layers, in_step))
        return await answer

    def _hear(self, post: Post) -> None:
        """One call of the thread. What the listener raises stops neither the books nor other calls."""
        self._thread.posted()
        calls = list[Callable[[], None]]()
        if self._listener is not None:
            calls = listener_calls(self._listener, post, self._aborting, self.release_layer)
        for sequence_id in post.aborted:
            self._aborting[sequence_id] -= 1
            if not self._aborting[sequence_id]:
                del self._aborting[sequence_id]
        for answer, result, error in post.answers:
            if answer.done():
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - goes where a loop callback's errors go
                loop = asyncio.get_running_loop()
                loop.call_exception_handler({"message": "engine listener failed", "exception": error})
        self._note_life(post)

    def _note_life(self, post: Post) -> None:
        if self._opened is None or self._ended is None:
            return
        if post.has_opened and not self._opened.done():
            self._opened.set_result(None)
        if post.has_ended:
            self._death = post.death
            if post.death is not None and not self._opened.done():
                self._opened.set_exception(post.death)
            self._ended.set_result(None)
