"""The surroundings of a service: identity, bus, metrics, background tasks, and its presence."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from libs.bus.bus import Bus
from libs.bus.messages.presence import Presence, ServiceState
from libs.runtime.identity import Identity

Spawn = Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""`Runtime.spawn`, for those who need nothing else of it."""

_NUM_CANCELLATIONS, _CANCELLATION_SECONDS = 3, 1.0

log = structlog.get_logger()


class Runtime:
    """One per process, made by `run_service` and handed to the service's `open`."""

    def __init__(self, identity: Identity, bus: Bus, registry: CollectorRegistry, presence: Presence) -> None:
        self.identity = identity
        self.bus = bus
        self.registry = registry
        """Where this process declares its metrics."""
        self._presence = presence
        self._listeners: list[Callable[[], None]] = []
        self._load_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def incarnation(self) -> str:
        """The address of messages to this process."""
        return self.identity.incarnation

    @property
    def presence(self) -> Presence:
        """How others see this process now."""
        return self._presence

    def progress(self, detail: str) -> None:
        """Tell others what this process is busy with: "loading weights 40%". Cheap; call freely."""
        self.describe(detail=detail)

    def describe(self, **facts: Any) -> None:
        """Change fields of this process's presence (link_address, model, ...). Told to others at once."""
        changed = msgspec.structs.replace(self._presence, **facts)
        if changed != self._presence:
            self._presence = changed
            for listener in self._listeners:
                listener()

    def become(self, state: ServiceState, detail: str = "") -> None:
        """Enter a state of life. The runtime does this around open, drain and close; a service where
        it takes no work for a while."""
        self.describe(state=state, detail=detail)
        log.info("state_entered", state=state.value, detail=detail)

    def on_presence_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of `presence`."""
        self._listeners.append(listener)

    def load_changed(self) -> None:
        """The load jumped: report it soon instead of at the next tick. Cheap; call freely."""
        self._load_changed.set()

    async def wait_load_changed(self, timeout_seconds: float) -> None:
        """Returns after `load_changed` or the timeout, whichever comes first."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._load_changed.wait()
        except TimeoutError:
            pass
        self._load_changed.clear()

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background until it ends or the service closes. Its error ends the service."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("background_task_crashed", task=task.get_name(), exc_info=error)
        if not self._crashed.done():
            self._crashed.set_result(error)

    async def wait_crashed(self) -> BaseException:
        """The error of the first background task that crashed; waits until one does."""
        return await asyncio.shield(self._crashed)

    async def cancel_spawned(self) -> None:
        """End all background tasks and wait for them. Idempotent."""
        await end_tasks(self._tasks)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel and wait, in a bound: some libraries swallow a cancellation, so it is said more than once."""
    pending = set(tasks)
    for _ in range(_NUM_CANCELLATIONS):
        for task in pending:
            task.cancel()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_CANCELLATION_SECONDS)
    if pending:
        log.warning("tasks_not_ended", tasks=[task.get_name() for task in pending])
