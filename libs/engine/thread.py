"""The one thread that owns torch, the pool and the sequences.

It takes commands, runs steps and pieces of other instances' modules, and posts what they gave to the event
loop, one call per step. When the loop falls behind by `_MAX_POSTED` calls, the thread waits for it.

It also turns an event loop of its own, when it sleeps and between layers: Links that live there carry calls
of hosted modules without a change of thread.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

from libs.cost.load import WorkerLoad
from libs.engine.core import EngineCore
from libs.engine.errors import EngineClosed, EngineDied, NotYet, WeightsLost
from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.device_turns import DeviceShare, DeviceTurns
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.mailbox import Mailbox
from libs.engine.meter import Meter
from libs.engine.outputs import LayerOutput, SequenceFailed, TokenOutput
from libs.engine.thread_loop import ThreadLoop
from libs.kv.layer_groups import layers_per_frame
from libs.placement.placement import HostedModuleStatus
from libs.request.outcome import FailureReason

_MAX_POSTED = 64
_PIECE_GAP_SECONDS = 0.05
"""Between two pieces of a move where steps are long; short ones have one piece after each."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Command:
    """Something to do with the core; `answer` gets what `act` returns or raises. After NotYet it is tried
    again, when a step or other commands were done."""

    act: Callable[[EngineCore], Any]
    answer: asyncio.Future[Any] | None = None
    between_layers: bool = False
    """A write into blocks that await it: harmless while a step runs, which may be long, and ahead of other
    commands, since what the write needs was answered before."""
    in_step: Callable[[EngineCore], Any] | None = None
    """What is done instead of `act` in the middle of a long step, where it may be done there, too; ahead of
    other commands."""
    is_abort_of: str = ""


@dataclass
class Post:
    """What the thread tells the loop in one call."""

    answers: list[tuple[asyncio.Future[Any], Any, Exception | None]] = field(default_factory=list)
    layers: list[LayerOutput] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    prompts_done: list[TokenOutput] = field(default_factory=list)
    failed: list[SequenceFailed] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    has_opened: bool = False
    has_ended: bool = False
    death: Exception | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing to tell."""
        has_results = self.layers or self.tokens or self.prompts_done or self.failed
        has_news = self.stored or self.removed or self.has_opened or self.has_ended
        return not (has_results or has_news or self.answers or self.aborted)


class EngineThread:
    """`start` once; ends after `stop`, or by an error that no step can be blamed for."""

    def __init__(
        self,
        open_core: Callable[[Callable[[list[LayerOutput]], None], Callable[[], None]], EngineCore],
        post: Callable[[Post], None],
        *,
        num_threads: int | None,
    ) -> None:
        self.own_loop = ThreadLoop()
        """Turned by this thread, and closed at its end."""
        self.mailbox = Mailbox[Command](self.own_loop)
        self.meter = Meter()
        self.load = WorkerLoad()
        self._open_core = open_core
        self._post_on_loop = post
        self._num_threads = num_threads
        self._room = threading.BoundedSemaphore(_MAX_POSTED)
        self._core: EngineCore | None = None
        self._turns: DeviceTurns | None = None
        self._deferred: list[Command] = []
        self._is_between_layers = self._is_writing = False
        self._copied_piece_at = 0.0
        self._broken: WeightsLost | None = None
        """By a command, which is told before the end."""
        self._is_stopping = False
        self._leaving: list[LayerOutput] = []
        self._num_leaving_layers = self._num_layers = 0
        # A daemon: a process whose event loop ended without `close` must be able to exit.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins; `has_opened` or `death` is posted on `loop`."""
        self._loop = loop
        self._thread.start()

    def discard(self) -> None:
        """Instead of `start`: frees what is held already."""
        if not self.own_loop.loop.is_closed():
            self.own_loop.close()

    def stop(self) -> None:
        """Ends after the step that runs now; `has_ended` is posted."""
        self.mailbox.put(Command(self._stop))

    def join(self) -> None:
        """Waits for the thread; call it after `has_ended` was posted."""
        self._thread.join()

    def posted(self) -> None:
        """The loop has taken one post."""
        self._room.release()

    def wake(self) -> None:
        """An answer has come; from any thread."""
        self.mailbox.wake()

    def wait(self, answer: Answer, timeout_seconds: float, worker: str = "") -> torch.Tensor:
        """What the host `worker` answers. For the core, on this thread: hosted work and writes between layers
        go on meanwhile, commands do not. Raises HostLost, also after `timeout_seconds`."""
        if self._turns is None:
            raise EngineClosed("the engine is not open; nothing can be asked of its hosts")
        is_between_layers, self._is_between_layers = self._is_between_layers, False
        try:
            return self._turns.wait(answer, timeout_seconds, worker)
        finally:
            self._is_between_layers = is_between_layers

    def call_hosted(self, owner: str, call: HostedCall, answer: Answer) -> None:
        """Queues a call of an owner to its modules here; from any thread, never waits."""
        if self._core is None:
            answer.fail(HostLost("", "the engine is not open"))
            return
        self._core.hosted.put(owner, call, answer)
        self.mailbox.wake()

    def hosted(self) -> tuple[HostedModuleStatus, ...]:
        """Modules of other instances that run here; from any thread."""
        return () if self._core is None else self._core.hosted.hosted()

    def _stop(self, core: EngineCore) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        core: EngineCore | None = None
        end = Post(has_ended=True)
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)  # of this thread: OpenMP keeps the count per thread
            core = self._open_core(self._layers_done, self._between_layers)
            del self._open_core  # it knows the model with all its layers, some of which may leave
            self._core, self._num_layers = core, core.model.config.num_layers
            share = DeviceShare(core.settings.device_share)
            self._turns = DeviceTurns(
                core.hosted, share, self.meter, self.mailbox, self._write_between_layers
            )
            self.load = core.load()
            self._post(Post(has_opened=True))
            self._serve(core, self._turns)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: its death is told, not swallowed
            _log.exception("engine_died")
            end.death = error
        self._end(core, end)

    def _end(self, core: EngineCore | None, end: Post) -> None:
        """Sequences, owners and commands are told at once, that the thread has ended when its Links have."""
        reason, detail = _why_ended(end.death)
        last = Post()
        try:
            if core is not None:
                last.failed = core.fail_all(reason, detail)
                core.hosted.end(detail)
            self._refuse_commands(last, end.death)
            self._post(last)
            self.own_loop.close()
        finally:
            self._refuse_commands(end, end.death)
            self._post(end)

    def _serve(self, core: EngineCore, turns: DeviceTurns) -> None:
        is_idle, has_changed, has_retried = True, False, True
        while True:
            # What an idle step changed may be what a command waits for: it is tried once before the sleep. So
            # may be what ended the sleep, and hosted work may leave no time for a step in between.
            is_at_rest = is_idle and (has_retried or not self._deferred)
            commands = self._take_commands(core, turns, is_at_rest=is_at_rest)
            if commands or has_changed or is_at_rest:
                has_retried = is_idle and not commands
                is_idle = not self._apply_all(core, commands) and is_idle
                has_changed = False
            if self._is_stopping:
                return
            if turns.debt_seconds:
                continue
            is_late = is_idle and core.seconds_to_deadline() == 0.0  # hosted work may have no end
            if not is_late and turns.run_hosted(is_own_ready=not is_idle):
                continue
            is_idle, has_changed = self._step(core, turns), True

    def _take_commands(self, core: EngineCore, turns: DeviceTurns, *, is_at_rest: bool) -> list[Command]:
        """Sleeps for them where there is nothing else to do, or nothing else may be done."""
        if debt := turns.debt_seconds:
            return self.mailbox.take_all(wait=True, timeout_seconds=debt)
        if not is_at_rest or turns.has_work:
            self._turn(core)
            return self.mailbox.take_all(wait=False)
        return self.mailbox.take_all(wait=True, timeout_seconds=core.seconds_to_deadline())

    def _step(self, core: EngineCore, turns: DeviceTurns) -> bool:
        """One step of the core; True where it had nothing to do."""
        turns.begin_own()
        step = core.step()
        turns.end_own(None if step.is_idle else step.num_tokens)
        self.load = core.load()
        self._post(
            Post(
                layers=self._take_leaving(),
                tokens=step.tokens,
                prompts_done=step.prompts_done,
                failed=step.failed,
                stored=step.stored,
                removed=step.removed,
            )
        )
        return step.is_idle

    def _apply_all(self, core: EngineCore, commands: list[Command]) -> bool:
        """Deferred ones first. True where one was done, told before the next step: nobody should wait for its
        end."""
        commands, self._deferred = [*self._deferred, *commands], []
        if not commands:
            return False
        post = Post()
        for command in commands:
            self._apply(core, command, post)
        self.load = core.load()
        self._post(post)
        if self._broken is not None:
            raise self._broken
        return len(self._deferred) < len(commands)

    def _apply(self, core: EngineCore, command: Command, post: Post) -> None:
        result: Any = None
        refusal: Exception | None = None
        act = command.in_step if self._is_between_layers and command.in_step else command.act
        try:
            result = act(core)
        except NotYet:
            self._deferred.append(command)
            return
        except Exception as error:
            if command.answer is None:
                raise
            refusal = error
            if isinstance(error, WeightsLost):
                self._broken = error
        if command.in_step:
            self._copied_piece_at = time.monotonic()
        if command.is_abort_of:
            post.aborted.append(command.is_abort_of)
        if isinstance(result, SequenceFailed):
            post.failed.append(result)
        if command.answer is not None:
            post.answers.append((command.answer, result, refusal))

    def _layers_done(self, outputs: list[LayerOutput]) -> None:
        """Layers that share a frame share a call: each call costs this thread the GIL for a while."""
        self._leaving += outputs
        self._num_leaving_layers += 1
        layer_bytes = sum(output.blocks.nbytes for output in outputs)
        is_last = outputs[-1].layer == self._num_layers - 1
        if is_last or self._num_leaving_layers >= layers_per_frame(self._num_layers, layer_bytes):
            self._post(Post(layers=self._take_leaving()))

    def _take_leaving(self) -> list[LayerOutput]:
        leaving, self._leaving, self._num_leaving_layers = self._leaving, [], 0
        return leaving

    def _turn(self, core: EngineCore) -> None:
        """Owners' calls come in, at once where there are owners."""
        if core.hosted.hosted():
            self.own_loop.turn()
        else:
            self.own_loop.turn_if_due()

    def _between_layers(self) -> None:
        self._is_between_layers = True
        try:
            if self._core is not None:
                self._turn(self._core)
            self._write_between_layers()
            if self._turns is not None:
                self._turns.between_layers()
        finally:
            self._is_between_layers = False

    def _write_between_layers(self) -> None:
        """Called while hosts are waited for, too. No piece is copied then: it may be a move that waits. And
        nothing where it is a write: one would wait within the other, and so on."""
        if self._core is None or self._is_writing or not (self.mailbox or self._deferred):
            return
        commands = self.mailbox.take(lambda command: command.between_layers)
        if self._is_between_layers and time.monotonic() - self._copied_piece_at >= _PIECE_GAP_SECONDS:
            commands += self._take_piece()
        post = Post()
        self._is_writing = True
        try:
            for command in commands:
                self._apply(self._core, command, post)
        finally:
            self._is_writing = False
        if not post.is_empty:
            self.load = self._core.load()
            self._post(post)

    def _take_piece(self) -> list[Command]:
        """The first one that waits. Others stay in order among themselves."""
        self._deferred += self.mailbox.take(lambda command: command.in_step is not None)
        for index, command in enumerate(self._deferred):
            if command.in_step is not None:
                return [self._deferred.pop(index)]
        return []

    def _refuse_commands(self, post: Post, death: Exception | None) -> None:
        error = EngineClosed("the engine is closed") if death is None else EngineDied(f"{death}")
        for command in [*self._deferred, *self.mailbox.take_all(wait=False)]:
            if command.answer is not None:
                post.answers.append((command.answer, None, error))
        self._deferred = []

    def _post(self, post: Post) -> None:
        if post.is_empty:
            return
        self._room.acquire()
        try:
            self._loop.call_soon_threadsafe(self._post_on_loop, post)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._is_stopping = True


def _why_ended(death: Exception | None) -> tuple[FailureReason, str]:
    """What its sequences are told; those of a lost peer are begun again elsewhere."""
    if death is None:
        return FailureReason.ABORTED, "the engine was closed"
    reason = FailureReason.PEER_LOST if isinstance(death, WeightsLost) else FailureReason.INTERNAL
    return reason, f"the engine died: {death}"
