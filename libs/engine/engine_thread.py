"""The one thread that owns torch, the pool and the sequences.

It takes commands, runs steps, and posts what they gave to the event loop, one call per step. When the loop
falls behind by `_MAX_POSTED` calls, the thread waits for it.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

from libs.bus.messages.presence import WorkerLoad
from libs.engine.engine_core import EngineCore
from libs.engine.errors import EngineClosed, EngineDied
from libs.engine.mailbox import Mailbox
from libs.engine.meter import Meter
from libs.engine.outputs import LayerOutput, SequenceFailed, TokenOutput
from libs.kv.layer_groups import layers_per_frame
from libs.request.outcome import FailureReason

_MAX_POSTED = 64

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Command:
    """Something to do with the core; `answer` gets what `act` returns or raises."""

    act: Callable[[EngineCore], Any]
    answer: asyncio.Future[Any] | None = None
    between_layers: bool = False
    """A write into blocks that await it: harmless while a step runs, which may be long, and ahead of other
    commands, since what the write needs was answered before."""
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
        loop: asyncio.AbstractEventLoop,
        num_threads: int | None,
    ) -> None:
        self.mailbox = Mailbox[Command]()
        self.meter = Meter()
        self.load = WorkerLoad()
        self._open_core = open_core
        self._post_on_loop = post
        self._loop = loop
        self._num_threads = num_threads
        self._room = threading.BoundedSemaphore(_MAX_POSTED)
        self._core: EngineCore | None = None
        self._is_stopping = False
        self._leaving: list[LayerOutput] = []
        self._num_leaving_layers = self._num_layers = 0
        # A daemon: a process whose event loop ended without `close` must be able to exit.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins; `has_opened` or `death` is posted."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step that runs now; `has_ended` is posted."""
        self.mailbox.put(Command(self._stop))

    def join(self) -> None:
        """Waits for the thread; call it after `has_ended` was posted."""
        self._thread.join()

    def posted(self) -> None:
        """The loop has taken one post."""
        self._room.release()

    def _stop(self, core: EngineCore) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        core: EngineCore | None = None
        end = Post(has_ended=True)
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)  # of this thread: OpenMP keeps the count per thread
            core = self._open_core(self._layers_done, self._write_between_layers)
            self._core, self._num_layers = core, core.model.config.num_layers
            self.load = core.load()
            self._post(Post(has_opened=True))
            self._serve(core)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: its death is told, not swallowed
            _log.exception("engine_died")
            end.death = error
        reason = FailureReason.ABORTED if end.death is None else FailureReason.INTERNAL
        detail = "the engine was closed" if end.death is None else f"the engine died: {end.death}"
        end.failed = core.fail_all(reason, detail) if core is not None else []
        self._refuse_commands(end)
        self._post(end)

    def _serve(self, core: EngineCore) -> None:
        is_idle = True
        while True:
            timeout_seconds = core.seconds_to_deadline() if is_idle else None
            commands = self.mailbox.take_all(wait=is_idle, timeout_seconds=timeout_seconds)
            if commands:
                self._apply_all(core, commands)  # told before the step: nobody should wait for its end
            if self._is_stopping:
                return
            self.meter.begin()
            step = core.step()
            self.meter.end(None if step.is_idle else step.num_tokens)
            is_idle = step.is_idle
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

    def _apply_all(self, core: EngineCore, commands: Iterable[Command]) -> None:
        post = Post()
        for command in commands:
            self._apply(core, command, post)
        self.load = core.load()
        self._post(post)

    def _apply(self, core: EngineCore, command: Command, post: Post) -> None:
        result: Any = None
        refusal: Exception | None = None
        try:
            result = command.act(core)
        except Exception as error:
            if command.answer is None:
                raise
            refusal = error
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

    def _write_between_layers(self) -> None:
        if not self.mailbox or self._core is None:
            return
        writes = self.mailbox.take(lambda command: command.between_layers)
        if writes:
            self._apply_all(self._core, writes)

    def _refuse_commands(self, end: Post) -> None:
        error = EngineClosed("the engine is closed") if end.death is None else EngineDied(f"{end.death}")
        for command in self.mailbox.take_all(wait=False):
            if command.answer is not None:
                end.answers.append((command.answer, None, error))

    def _post(self, post: Post) -> None:
        if post.is_empty:
            return
        self._room.acquire()
        try:
            self._loop.call_soon_threadsafe(self._post_on_loop, post)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._is_stopping = True
