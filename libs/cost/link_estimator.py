"""What the Link to a host costs, learned from calls that were answered."""

import math

from libs.cost.estimators import LEAST_SECONDS, MOST_SECONDS, Measurements
from libs.cost.migration import DEFAULT_LINK_COST, LinkCost


class LinkCostEstimator:
    """Learns the `LinkCost` of one Link. One thread observes, any may read `cost`.

    Calls that were held up (a busy core, another call in front) take many times as long as others and are not
    listened to, unless most are.
    """

    def __init__(self, prior: LinkCost = DEFAULT_LINK_COST) -> None:
        self.cost = prior
        """The best guess so far; finite and above zero, whatever was observed."""
        self._measured = Measurements((prior.latency_seconds, 1.0 / prior.bytes_per_second))

    def observe(self, num_bytes: float, seconds: float, *, num_messages: int = 2) -> None:
        """`num_bytes` both ways together were `seconds` on the way, in so many messages one after the other:
        two for a call and its answer. The seconds are without what the host computed. What cannot be (no
        time, negative bytes, NaN) is ignored."""
        is_measurable = LEAST_SECONDS <= seconds <= MOST_SECONDS
        if num_messages < 1 or not 0 <= num_bytes < math.inf or not is_measurable:
            return
        self._measured.add((float(num_messages), float(num_bytes)), seconds)
        latency_seconds, byte_seconds = self._measured.rates
        self.cost = LinkCost(bytes_per_second=1.0 / byte_seconds, latency_seconds=latency_seconds)
