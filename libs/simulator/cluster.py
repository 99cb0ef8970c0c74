"""The simulated mesh: what happens to a request from its arrival to its last token."""

from collections.abc import Iterable, Iterator

from libs.routing.policies import Policy
from libs.simulator.decode_instance import DecodeInstance
from libs.simulator.event_loop import Due, run_events
from libs.simulator.fetching import Fetching
from libs.simulator.job import Job
from libs.simulator.placing import Placing
from libs.simulator.prefill_instance import PrefillInstance
from libs.simulator.report import Report, make_report
from libs.simulator.shape import ClusterShape
from libs.simulator.trace import TraceRequest


class Cluster:
    """Instances and stores as `shape` says, placed at by one policy. Good for one replay."""

    def __init__(self, shape: ClusterShape, policy: Policy, *, seed: int = 0) -> None:
        self.fetching = Fetching(shape)
        self.prefills = [
            PrefillInstance(
                f"prefill-{number}", shape, self._begin_fetch, self._prefilled, self.place_waiting
            )
            for number in range(shape.num_prefill)
        ]
        self.decodes = [
            DecodeInstance(f"decode-{number}", shape.decode, shape.block_size, self._finished)
            for number in range(shape.num_decode)
        ]
        self.finished: list[Job] = []
        self.refused: list[Job] = []
        self._block_size = shape.block_size
        self._placing = Placing(shape, policy, self.prefills, self.decodes, self.fetching, seed)
        self._prefill_of = {prefill.name: prefill for prefill in self.prefills}
        self._decode_of = {decode.name: decode for decode in self.decodes}

    def replay(self, requests: Iterable[TraceRequest], beside: Iterable[Due] = ()) -> None:
        """Let all requests happen, which are in order of arrival, and what is due beside them."""
        run_events([*beside, *self._next_arrival(enumerate(requests))])

    def report(self, policy_name: str) -> Report:
        """What came of it."""
        busy = {prefill.name: prefill.busy_seconds for prefill in self.prefills}
        return make_report(policy_name, self.finished, len(self.refused), busy, self._block_size)

    def _next_arrival(self, requests: Iterator[tuple[int, TraceRequest]]) -> list[Due]:
        number, request = next(requests, (-1, None))
        if request is None:
            return []

        def arrives(now: float) -> list[Due]:
            return self._next_arrival(requests) + self._arrive(number, request, now)

        return [Due(request.arrival_seconds, arrives)]

    def _arrive(self, number: int, request: TraceRequest, now: float) -> list[Due]:
        job = Job(number, request, list(request.names[: request.num_input_tokens // self._block_size]))
        if not self._placing.can_ever_place(job):
            self.refused.append(job)
            return []
        self._placing.enter(job)
        return self.place_waiting(now)

    def place_waiting(self, now: float) -> list[Due]:
        """Give those a place who fit now."""
        dues: list[Due] = []
        while (place := self._placing.place(now)) is not None:
            job, prefill, decode = place
            job.prefill, job.decode, job.placed_at = prefill.name, decode.name, now
            dues += prefill.enqueue(job, now)
        return dues

    def _begin_fetch(self, job: Job, now: float) -> list[Due]:
        return self.fetching.begin(job, self._prefill_of[job.prefill], now)

    def _prefilled(self, job: Job, now: float) -> list[Due]:
        return self.fetching.put(job, now) + self._decode_of[job.decode].begin(job, now)

    def _finished(self, job: Job, now: float) -> list[Due]:
        self.finished.append(job)
        return self.place_waiting(now)
