"""The router on the bus: hears the cluster, answers `Place`."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import NoReturn

import structlog

from libs.bus.messages.generation import Place, Placed, Refused, Unplace
from libs.bus.messages.presence import LoadReport, ServiceKind
from libs.bus.subscriptions import Subscription
from libs.kv_events.subscriber import KvSubscriber
from libs.kv_events.view import KvView
from libs.mesh.workers import WORKERS
from libs.routing.policies import POLICIES
from libs.runtime.roster import Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from libs.telemetry.traces import start_span
from services.router.admission import Admission, AdmissionRules, Answer
from services.router.choosing import Choosing
from services.router.matching import Matching
from services.router.metrics import RouterMetrics
from services.router.settings import RouterSettings
from services.router.view import ClusterView

QUEUE_GROUP = "routers"
HOLDERS = (*WORKERS, ServiceKind.KV_STORE)
"""Who tells which blocks it holds."""
PLACEMENT_SECONDS = 5.0
"""Within this a gateway has told the workers about a placement, or is gone."""
MAX_PLACEMENTS = 65536
TICK_SECONDS = 1.0
STOOD_STILL_SECONDS = 2.0
"""Without a tick for so long, this process did not run: it was stopped, or its machine was."""

log = structlog.get_logger()


class RouterService:
    """One router. `clock` gives unix seconds."""

    def __init__(self, settings: RouterSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        self._view = ClusterView(
            stale_after_seconds=settings.stale_after_seconds,
            placement_seconds=PLACEMENT_SECONDS,
            max_placements=MAX_PLACEMENTS,
        )
        rules = AdmissionRules(
            max_queue=settings.max_queue,
            no_workers_grace_seconds=settings.no_workers_grace_seconds,
            starting_grace_seconds=settings.starting_grace_seconds,
        )
        matching = Matching(
            Choosing(POLICIES[settings.policy], settings.session_stickiness_seconds),
            settings.max_waiting_tokens,
            settings.max_expected_output_tokens,
        )
        self._held = KvView(settings.max_known_blocks)
        self._admission = Admission(rules, matching, self._view, self._held, clock(), Random())
        self._roster = Roster()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._changed = asyncio.Event()
        self._has_news = False
        self._ticked_at = time.monotonic()
        self._timeouts_reset_at = self._roster.timeouts_reset_at
        self._subscriptions: list[Subscription | KvSubscriber] = []
        self._placing: Subscription | None = None

    async def open(self, runtime: Runtime) -> None:
        """Start to listen; ready at once, because requests may wait until workers are heard."""
        self._metrics = RouterMetrics(runtime.registry)
        self._subscriber = KvSubscriber(runtime.bus, self._held)
        self._metrics.num_requests_waiting.set_function(lambda: len(self._admission))
        self._metrics.num_placements.set_function(self._view.num_placements)
        for kind in WORKERS:
            self._metrics.num_instances.labels(kind.value).set_function(partial(self._num_ready, kind))
        watching = watch_roster(runtime.bus, self._roster, self._roster_changed, hears_itself=True)
        runtime.spawn("roster", watching)
        runtime.spawn("clock", self._keep_time())
        self._metrics.watch_view(self._held, self._subscriber)
        await self._subscriber.open()
        self._subscriptions.append(self._subscriber)
        runtime.spawn("kv_view", self._subscriber.run())
        self._subscriptions.append(await runtime.bus.subscribe(LoadReport, self._hear))
        self._subscriptions.append(await runtime.bus.subscribe(Unplace, self._unplace))
        self._placing = await runtime.bus.serve(Place, self._place, queue_group=QUEUE_GROUP)

    async def drain(self) -> None:
        """Leave the queue group, then refuse those who wait here; another router can place them."""
        self._tell(self._admission.drain())
        if self._placing is not None:
            await self._placing.close()

    async def close(self) -> None:
        """End the subscriptions. Whoever still waits is refused."""
        self._tell(self._admission.drain())
        for subscription in [*self._subscriptions, *([self._placing] if self._placing else [])]:
            await subscription.close()

    def _num_ready(self, kind: ServiceKind) -> int:
        return len(self._view.ready(kind, self._clock()))

    async def _place(self, place: Place) -> Placed | Refused:
        self._tick()
        now = self._clock()
        with start_span("router.place", place.traceparent, request_id=place.request_id) as span:
            started = time.perf_counter()
            ticket, answers = self._admission.enter(place, now)
            self._metrics.decision_seconds.observe(time.perf_counter() - started)
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._waiting[ticket.number] = future
            self._tell(answers)
            try:
                answer = await future
            finally:
                del self._waiting[ticket.number]
                self._admission.leave(ticket.number)
            self._count(answer, self._clock() - now)
            span.set_attribute(
                "outcome", answer.outcome.reason.value if isinstance(answer.outcome, Refused) else "placed"
            )
        return answer.outcome

    def _unplace(self, message: Unplace) -> None:
        self._tick()
        self._tell(self._admission.withdraw(message.request_id, self._clock()))

    def _hear(self, report: LoadReport) -> None:
        self._view.hear(report, self._clock())
        # Decided once for all reports that are here: a thousand workers send thousands a second.
        self._has_news = True
        self._changed.set()

    def _roster_changed(self, change: RosterChange) -> None:
        for presence in change.departed:
            log.info("peer_departed", peer=presence.name, incarnation=presence.incarnation)
        self._tick()
        members = self._roster.all()
        self._view.set_members(members)
        self._subscriber.set_publishers(one.incarnation for one in members if one.kind in HOLDERS)
        self._tell(self._admission.decide(self._clock()))

    def _tell(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            future = self._waiting.get(answer.ticket.number)
            if future is not None and not future.done():
                future.set_result(answer)
        self._changed.set()

    async def _keep_time(self) -> NoReturn:
        """Decide when reports came in, and when time alone changes something: deadlines, graces, silences."""
        while True:
            self._tick()
            self._changed.clear()
            if self._has_news or await self._time_came():
                self._has_news = False
                self._tick()
                self._tell(self._admission.decide(self._clock()))
                await asyncio.sleep(0)

    def _tick(self) -> None:
        """Before anything is decided: what waited in the meantime is handled in any order."""
        ticked_at, self._ticked_at = self._ticked_at, time.monotonic()
        timeouts_reset_at, self._timeouts_reset_at = self._timeouts_reset_at, self._roster.timeouts_reset_at
        if self._ticked_at - ticked_at > STOOD_STILL_SECONDS:
            log.warning("stood_still", seconds=round(self._ticked_at - ticked_at, 1))
            self._admission.awoke(self._clock())
        elif self._timeouts_reset_at != timeouts_reset_at:  # the broker was away, or stood still
            self._admission.awoke(self._clock())

    async def _time_came(self) -> bool:
        """Wait for the next moment that changes something, or tick; False: something else changed before."""
        now = self._clock()
        wake_at = self._admission.next_wake(now)
        try:
            async with asyncio.timeout(max(0.0, min(TICK_SECONDS, wake_at - now))):
                await self._changed.wait()
        except TimeoutError:
            return True
        return False

    def _count(self, answer: Answer, seconds: float) -> None:
        self._metrics.queue_seconds.observe(seconds)
        if isinstance(answer.outcome, Refused):
            self._metrics.refused.labels(answer.outcome.reason.value).inc()
            return
        self._metrics.placed.inc()
        if answer.match is not None:
            self._metrics.decisions.labels(answer.match.kind.value).inc()
            self._metrics.predicted_ttft_seconds.observe(answer.match.ttft_seconds)
