"""Which requests a worker takes, whatever it is to do for them. Pure."""

from collections.abc import Callable

from libs.bus.messages.generation import Refused
from libs.request.generation import Generation
from libs.request.outcome import RefusalReason
from libs.worker.recent_requests import RecentRequests


class Admission:
    """Requests that came, ended and were aborted lately. `clock` gives unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.draining: str = ""
        """Why nothing is taken for now, in words; empty: requests are taken."""
        self._taken, self._ended, self._aborted = RecentRequests(), RecentRequests(), RecentRequests()

    def refusal(self, generation: Generation) -> Refused | None:
        """Why this one is not taken, as far as that does not depend on what is here."""
        if self.draining:
            return Refused(reason=RefusalReason.DRAINING, detail=self.draining)
        if generation.deadline_unix_seconds <= self._clock():
            return Refused(reason=RefusalReason.DEADLINE, detail="its deadline passed on the way here")
        if generation.request_id in self._aborted.ids(self._clock()):
            return Refused(reason=RefusalReason.OVERLOADED, detail="it was aborted before it came")
        return None

    def taken(self, request_id: str) -> None:
        """It is counted in load reports from now on."""
        self._taken.add(request_id, self._clock())

    def ended(self, request_id: str) -> None:
        """Its gateway was told, or will be at once."""
        self._ended.add(request_id, self._clock())

    def aborted_unknown(self, request_id: str) -> None:
        """An abort can overtake the request that it is about: they come on two subscriptions."""
        self._aborted.add(request_id, self._clock())

    def recently_taken(self) -> tuple[str, ...]:
        """Request ids, for load reports."""
        return self._taken.ids(self._clock())

    def recently_ended(self) -> tuple[str, ...]:
        """Request ids, for load reports."""
        return self._ended.ids(self._clock())
