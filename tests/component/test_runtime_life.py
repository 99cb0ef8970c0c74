"""One life on the in-memory bus, in virtual time: open, ready, serve, drain, close; and what can go wrong."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.presence import LoadReport, ServiceKind, ServiceState
from libs.config.errors import SettingsError
from libs.cost.load import WorkerLoad
from libs.runtime.heartbeat import HEARTBEAT_SECONDS, LOAD_REPORT_SECONDS, MIN_LOAD_GAP_SECONDS
from libs.runtime.identity import new_identity
from libs.runtime.life import Stop
from libs.runtime.roster import EXPIRY_SECONDS, Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from libs.runtime.service import live_on
from libs.runtime.settings import RuntimeSettings

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Recorder:
    """A service that notes what is done to it; a test sets what goes wrong."""

    def __init__(self, open_error: Exception | None = None, drain_seconds: float = 0.0) -> None:
        self.done: list[str] = []
        self.open_error = open_error
        self.drain_seconds = drain_seconds
        self.close_error: Exception | None = None
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.opened = asyncio.Event()
        self.runtime: Runtime | None = None

    async def open(self, runtime: Runtime) -> None:
        self.runtime = runtime
        runtime.progress("loading")
        self.done.append("open")
        await self.may_open.wait()
        if self.open_error:
            raise self.open_error
        runtime.describe(link_address="memory://1", max_model_len=7)
        self.opened.set()

    async def drain(self) -> None:
        self.done.append("drain")
        await asyncio.sleep(self.drain_seconds)
        self.done.append("drained")

    async def close(self) -> None:
        self.done.append("close")
        if self.close_error:
            raise self.close_error

    @property
    def running(self) -> Runtime:
        assert self.runtime is not None
        return self.runtime


class Worker(Recorder):
    """One that others place work on."""

    num_waiting = 0

    def load(self) -> WorkerLoad:
        return WorkerLoad(num_waiting=self.num_waiting)


@dataclass
class Scene:
    """A broker, the service's life on it, and an onlooker with a roster."""

    service: Recorder
    broker: MemoryBroker
    bus: MemoryBus
    stop: Stop = field(default_factory=Stop)
    changes: list[RosterChange] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    roster: Roster = field(default_factory=Roster)

    async def until(self, happened: Callable[[], object]) -> None:
        """Wait for a change in the onlooker's roster that makes it so."""
        async with asyncio.timeout(60):
            while not happened():
                self.told.clear()
                await self.told.wait()

    def states(self) -> list[ServiceState]:
        """As the onlooker saw them."""
        return [p.state for c in self.changes for p in (*c.arrived, *c.updated)]

    def seen(self, state: ServiceState) -> Callable[[], bool]:
        return lambda: any(p.state is state for p in self.roster.all())

    def _told(self, change: RosterChange) -> None:
        self.changes.append(change)
        self.told.set()


async def lived(service: Recorder, story: Callable[[Scene], Coroutine[Any, Any, None]]) -> tuple[int, Scene]:
    """Run a life beside `story`, which ends it in some way; returns the exit code."""
    broker = MemoryBroker(clock=asyncio.get_running_loop().time)
    scene = Scene(service, broker, MemoryBus(broker))
    onlooker = MemoryBus(broker)
    watching = asyncio.create_task(watch_roster(onlooker, scene.roster, scene._told))
    settings = RuntimeSettings(drain_timeout_seconds=5.0)
    identity = new_identity(ServiceKind.DECODE_WORKER, "decode-0")
    life = asyncio.create_task(
        live_on(scene.bus, identity, settings, service, scene.stop, serves_probes=False)
    )
    await story(scene)
    async with asyncio.timeout(60):
        exit_code = await life
    await scene.until(lambda: not scene.roster.all())
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await scene.bus.close()
    await onlooker.close()
    return exit_code, scene


async def until_ready_then_stop(scene: Scene) -> None:
    await scene.until(scene.seen(ServiceState.READY))
    scene.stop.asked.set()


def test_a_whole_life_in_order_and_as_others_see_it(run_virtually: Run) -> None:
    async def story() -> None:
        exit_code, scene = await lived(Recorder(), until_ready_then_stop)
        assert exit_code == 0
        assert scene.service.done == ["open", "drain", "drained", "close"]
        states = scene.states()
        assert states[0] is ServiceState.STARTING
        assert states.index(ServiceState.READY) < states.index(ServiceState.DRAINING)
        assert [p.incarnation for p in scene.changes[-1].departed] == [scene.service.running.incarnation]

    run_virtually(story())


def test_progress_and_facts_are_told_at_once(run_virtually: Run) -> None:
    async def progress(scene: Scene) -> None:
        scene.service.may_open.clear()
        await scene.until(lambda: any(p.detail == "loading" for p in scene.roster.all()))
        begun = asyncio.get_running_loop().time()
        scene.service.running.progress("loading 40%")
        await scene.until(lambda: any(p.detail == "loading 40%" for p in scene.roster.all()))
        assert asyncio.get_running_loop().time() - begun < HEARTBEAT_SECONDS
        scene.service.may_open.set()
        await scene.until(scene.seen(ServiceState.READY))
        (presence,) = scene.roster.all()
        assert (presence.link_address, presence.max_model_len, presence.detail) == ("memory://1", 7, "")
        scene.stop.asked.set()

    async def story() -> None:
        assert (await lived(Recorder(), progress))[0] == 0

    run_virtually(story())


def test_a_service_that_cannot_open_is_closed_and_ends_with_1(run_virtually: Run) -> None:
    async def wait(scene: Scene) -> None: ...

    async def story() -> None:
        exit_code, scene = await lived(Recorder(ValueError("no such layer")), wait)
        assert exit_code == 1
        assert scene.service.done == ["open", "close"]

    run_virtually(story())


def test_settings_refused_while_opening_end_with_2(run_virtually: Run) -> None:
    async def wait(scene: Scene) -> None: ...

    async def story() -> None:
        assert (await lived(Recorder(SettingsError("--model: this kind is not known")), wait))[0] == 2

    run_virtually(story())


def test_asked_to_stop_while_opening_it_closes_without_draining(run_virtually: Run) -> None:
    async def stop_early(scene: Scene) -> None:
        scene.service.may_open.clear()
        await scene.until(scene.seen(ServiceState.STARTING))
        scene.stop.asked.set()

    async def story() -> None:
        exit_code, scene = await lived(Recorder(), stop_early)
        assert exit_code == 0
        assert scene.service.done == ["open", "close"]

    run_virtually(story())


@pytest.mark.parametrize("while_opening", [False, True])
def test_a_crash_in_the_background_brings_the_service_down_with_1(
    run_virtually: Run, while_opening: bool
) -> None:
    async def crash() -> None:
        raise RuntimeError("the engine is gone")

    async def break_it(scene: Scene) -> None:
        if while_opening:
            scene.service.may_open.clear()
        state = ServiceState.STARTING if while_opening else ServiceState.READY
        await scene.until(scene.seen(state))
        scene.service.running.spawn("engine", crash())

    async def story() -> None:
        exit_code, scene = await lived(Recorder(), break_it)
        assert exit_code == 1
        assert scene.service.done == ["open", "close"]

    run_virtually(story())


def test_a_background_task_that_ends_by_itself_is_fine_and_the_rest_is_cancelled_at_the_end(
    run_virtually: Run,
) -> None:
    cancelled = asyncio.Event()

    async def short() -> None: ...

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def spawn(scene: Scene) -> None:
        await scene.until(scene.seen(ServiceState.READY))
        await scene.service.running.spawn("short", short())
        scene.service.running.spawn("endless", endless())
        await asyncio.sleep(0)
        scene.stop.asked.set()

    async def story() -> None:
        assert (await lived(Recorder(), spawn))[0] == 0
        assert cancelled.is_set()

    run_virtually(story())


def test_draining_is_bounded(run_virtually: Run) -> None:
    async def story() -> None:
        begun = asyncio.get_running_loop().time()
        exit_code, scene = await lived(Recorder(drain_seconds=1e6), until_ready_then_stop)
        assert exit_code == 0
        assert scene.service.done == ["open", "drain", "close"]
        assert asyncio.get_running_loop().time() - begun < 20

    run_virtually(story())


def test_without_a_parent_nobody_waits_for_the_work_in_progress(run_virtually: Run) -> None:
    async def orphan(scene: Scene) -> None:
        await scene.until(scene.seen(ServiceState.READY))
        scene.stop.skip_drain = True
        scene.stop.asked.set()

    async def story() -> None:
        exit_code, scene = await lived(Recorder(), orphan)
        assert (exit_code, scene.service.done) == (0, ["open", "close"])

    run_virtually(story())


def test_an_error_while_closing_does_not_keep_the_process_from_saying_good_bye(run_virtually: Run) -> None:
    async def story() -> None:
        service = Recorder()
        service.close_error = RuntimeError("stuck")
        exit_code, scene = await lived(service, until_ready_then_stop)
        assert exit_code == 0
        assert scene.roster.all() == []

    run_virtually(story())


def test_a_broker_that_comes_back_empty_hears_of_everybody_again(run_virtually: Run) -> None:
    async def restart(scene: Scene) -> None:
        await scene.until(scene.seen(ServiceState.READY))
        incarnation = scene.service.running.incarnation
        scene.broker.stop()
        await asyncio.sleep(10 * EXPIRY_SECONDS)
        assert scene.roster.get(incarnation), "an outage is not held against the peers"
        scene.broker.start()
        await asyncio.sleep(2 * EXPIRY_SECONDS)
        assert scene.roster.get(incarnation)
        assert not [p for c in scene.changes for p in c.departed]
        scene.stop.asked.set()

    async def story() -> None:
        assert (await lived(Recorder(), restart))[0] == 0

    run_virtually(story())


def test_its_load_is_known_before_others_hear_that_it_is_ready(run_virtually: Run) -> None:
    async def listen(scene: Scene) -> None:
        heard: list[str] = []
        listener = MemoryBus(scene.broker)
        await listener.subscribe(LoadReport, lambda report: heard.append("load"))
        await scene.until(scene.seen(ServiceState.READY))
        assert heard[:1] == ["load"]
        await listener.close()
        scene.stop.asked.set()

    async def story() -> None:
        assert (await lived(Worker(), listen))[0] == 0

    run_virtually(story())


def test_loads_are_reported_regularly_and_soon_after_a_jump_but_not_all_the_time(run_virtually: Run) -> None:
    async def jump(scene: Scene) -> None:
        assert isinstance(scene.service, Worker)
        reports: list[tuple[float, LoadReport]] = []
        loop = asyncio.get_running_loop()
        listener = MemoryBus(scene.broker)
        await listener.subscribe(LoadReport, lambda report: reports.append((loop.time(), report)))
        await scene.until(scene.seen(ServiceState.READY))
        await asyncio.sleep(10.1)
        assert len(reports) == pytest.approx(10 / LOAD_REPORT_SECONDS, abs=2)
        reports.clear()
        scene.service.num_waiting, jumped = 5, loop.time()
        scene.service.running.load_changed()
        await asyncio.sleep(2 * MIN_LOAD_GAP_SECONDS)
        assert reports[0][1].load.num_waiting == 5
        assert reports[0][0] - jumped <= MIN_LOAD_GAP_SECONDS
        reports.clear()
        for _ in range(1000):
            scene.service.running.load_changed()
            await asyncio.sleep(0.001)
        assert len(reports) <= 1.1 / MIN_LOAD_GAP_SECONDS
        numbers = [report.sequence for _, report in reports]
        assert numbers == sorted(set(numbers))
        await listener.close()
        scene.stop.asked.set()

    async def story() -> None:
        assert (await lived(Worker(), jump))[0] == 0

    run_virtually(story())
