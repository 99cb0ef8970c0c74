"""The queue of requests that wait for a place. One synchronous function decides; the caller then answers.

First come, first served among the requests for one model: a long prompt waits for its room, and short ones
behind it do not starve it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from random import Random

from libs.bus.messages.generation import Place, Placed, Refused
from libs.kv_events.view import KvView
from libs.request.outcome import RefusalReason
from libs.routing.candidates import Draw
from services.router.choosing import Match
from services.router.matching import Matching, Obstacle
from services.router.view import ClusterView

MAX_RETRY_AFTER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """Bounds of the queue."""

    max_queue: int
    no_workers_grace_seconds: float
    """How long requests wait for a first usable pair before they are refused."""
    starting_grace_seconds: float
    """The same while some worker is starting."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One question in the queue. Its number tells apart two questions about one request."""

    number: int
    place: Place
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell the asker of a ticket."""

    ticket: Ticket
    outcome: Placed | Refused
    match: Match | None = None
    """Of a placement: what is expected of it."""


class Admission:
    """Tickets in order of arrival, and the views they are decided by. `chance` is what choices draw from."""

    def __init__(
        self,
        rules: AdmissionRules,
        matching: Matching,
        view: ClusterView,
        held: KvView,
        now: float,
        chance: Random,
    ) -> None:
        self._rules, self._matching, self._view, self._held = rules, matching, view, held
        self._chance = chance
        self._queue: OrderedDict[int, Ticket] = OrderedDict()
        self._num_tickets = 0
        self._num_placed = 0
        self._pair_seen_at = now
        self._awake_since = now
        self._draining = False

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, place: Place, now: float) -> tuple[Ticket, list[Answer]]:
        """Queue a question and decide. The answers may be about any ticket, this one included."""
        self._num_tickets += 1
        ticket = Ticket(self._num_tickets, place, now)
        if self._draining:
            return ticket, [_refuse(ticket, RefusalReason.DRAINING, "this router is shutting down", 0.1)]
        self._queue[ticket.number] = ticket
        answers = self.decide(now)
        if len(self._queue) > self._rules.max_queue:
            # Only the newest can be over the bound, and decide() has left it there.
            del self._queue[ticket.number]
            detail = f"{self._rules.max_queue} requests are waiting already"
            retry_after_seconds = min(MAX_RETRY_AFTER_SECONDS, 1.0 + self._rules.max_queue / 64)
            answers.append(_refuse(ticket, RefusalReason.OVERLOADED, detail, retry_after_seconds))
        return ticket, answers

    def awoke(self, now: float) -> None:
        """Until now this router stood still, or could hear nobody: the silence of others was its own.
        Patience begins anew."""
        self._awake_since = now

    def leave(self, number: int) -> None:
        """The asker is gone; nobody awaits an answer."""
        self._queue.pop(number, None)

    def withdraw(self, request_id: str, now: float) -> list[Answer]:
        """The request is not wanted any more, queued or placed. What it held goes to those who wait."""
        gone = [ticket for ticket in self._queue.values() if ticket.place.request_id == request_id]
        for ticket in gone:
            del self._queue[ticket.number]
        self._view.withdraw(request_id)
        answers = [
            _refuse(ticket, RefusalReason.OVERLOADED, "withdrawn by its gateway", 0.0) for ticket in gone
        ]
        return answers + self.decide(now)

    def drain(self) -> list[Answer]:
        """Refuse all, now and from now on; another router may place them."""
        self._draining = True
        tickets = list(self._queue.values())
        self._queue.clear()
        return [_refuse(t, RefusalReason.DRAINING, "this router is shutting down", 0.1) for t in tickets]

    def decide(self, now: float) -> list[Answer]:
        """Answer all that can be answered now. Call it on every change of the view and at `next_wake`."""
        self._view.forget_old_placements(now)
        self._note_pairs(now)
        answers: list[Answer] = []
        blocked_models: set[str] = set()
        for ticket in list(self._queue.values()):
            answer = self._decide_one(ticket, blocked_models, now)
            if answer is not None:
                del self._queue[ticket.number]
                answers.append(answer)
        return answers

    def next_wake(self, now: float) -> float:
        """When `decide` must be called at the latest if nothing happens before; infinity: nobody waits."""
        if not self._queue:
            return float("inf")
        graces = (self._rules.no_workers_grace_seconds, self._rules.starting_grace_seconds)
        starts = [
            self._pair_seen_at,
            self._awake_since,
            *(ticket.arrived_at for ticket in self._queue.values()),
        ]
        ends = [start + grace for start in starts for grace in graces if start + grace > now]
        deadlines = [ticket.place.deadline_unix_seconds for ticket in self._queue.values()]
        return min([*deadlines, *ends, self._view.next_change(now)])

    def _decide_one(self, ticket: Ticket, blocked_models: set[str], now: float) -> Answer | None:
        """None: it waits on."""
        place = ticket.place
        if place.deadline_unix_seconds <= now:
            return _refuse(ticket, RefusalReason.DEADLINE, "no place was free before its deadline")
        if place.model in blocked_models:
            return None
        draw = Draw(self._num_placed, self._chance.random(), self._chance.random())
        match = self._matching.match(place, ticket.arrived_at, self._view, self._held, draw, now)
        if isinstance(match, Match):
            self._num_placed += 1
            self._view.place(place.request_id, match.shares, now)
            return Answer(ticket, match.placed, match)
        if match is Obstacle.NO_ROOM:
            if not place.exclude:  # one that avoids workers holds back nobody who does not
                blocked_models.add(place.model)
            return None
        if match is Obstacle.TOO_LONG:
            detail = f"{place.num_tokens} tokens fit no pair of instances, even when it is empty"
            return _refuse(ticket, RefusalReason.TOO_LONG, detail)
        return self._no_workers(ticket) if self._gives_up(ticket, now) else None

    def _note_pairs(self, now: float) -> None:
        if self._view.has_pair(now):
            self._pair_seen_at = now

    def _gives_up(self, ticket: Ticket, now: float) -> bool:
        rules = self._rules
        patience = (
            rules.starting_grace_seconds if self._view.has_starting() else rules.no_workers_grace_seconds
        )
        # With pairs about that are not for this request (it excludes them, or names another model), its
        # patience runs from its own arrival.
        # So it does while workers start: however long they load, a newcomer gets the patience promised.
        waits_for_others = self._pair_seen_at == now or self._view.has_starting()
        since = ticket.arrived_at if waits_for_others else self._pair_seen_at
        return now >= max(since, self._awake_since) + patience

    def _no_workers(self, ticket: Ticket) -> Answer:
        detail = "no decode instance with a way to run prompts is ready"
        return _refuse(ticket, RefusalReason.NO_WORKERS, detail, self._rules.no_workers_grace_seconds)


def _refuse(ticket: Ticket, reason: RefusalReason, detail: str, retry_after_seconds: float = 1.0) -> Answer:
    return Answer(ticket, Refused(reason=reason, detail=detail, retry_after_seconds=retry_after_seconds))
