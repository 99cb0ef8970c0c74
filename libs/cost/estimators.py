"""Costs learned from what was measured, online.

The last measurements of every size class are kept, not the last of all: a thousand alike say less about the
rates than ten that differ. Old ones fade, so that a machine that became slower is seen as such.
"""

import math
from collections import deque

import numpy as np

from libs.cost.fetch import DEFAULT_FETCH_COST, FetchCost, streaming_seconds
from libs.cost.prefill import DEFAULT_PREFILL_COST, PrefillCost, num_pairs
from libs.cost.robust_fit import fit_rates

KEPT_PER_CLASS = 8
HALF_LIFE = 512
"""A measurement weighs half after so many others."""
FIT_EVERY = 16
"""Measurements between two fits, once there are so many; before that each is followed by one."""
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e5
"""What is shorter or longer was not measured: a clock's fault, a machine that slept."""


class Measurements:
    """The last measurements of each size class, and the rates that fit them."""

    def __init__(self, prior: tuple[float, ...]) -> None:
        self.rates = prior
        self._prior = np.array(prior)
        self._num_seen = 0
        self._by_class: dict[tuple[int, ...], deque[tuple[int, tuple[float, ...], float]]] = {}

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        """Take one in; fit again where it is time to."""
        size_class = tuple(math.frexp(feature)[1] for feature in features)
        kept = self._by_class.setdefault(size_class, deque(maxlen=KEPT_PER_CLASS))
        kept.append((self._num_seen, features, seconds))
        self._num_seen += 1
        if self._num_seen <= FIT_EVERY or self._num_seen % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        rows = [row for kept in self._by_class.values() for row in kept]
        ages = self._num_seen - np.array([seen for seen, _, _ in rows])
        rates = fit_rates(
            np.array([features for _, features, _ in rows]),
            np.array([seconds for _, _, seconds in rows]),
            np.exp2(-ages / HALF_LIFE),
            self._prior,
        )
        self.rates = tuple(float(rate) for rate in rates)


class PrefillEstimator:
    """Learns a `PrefillCost` from steps of the engine. One thread observes, any may read `cost`."""

    def __init__(self, prior: PrefillCost = DEFAULT_PREFILL_COST) -> None:
        self.cost = prior
        """The best guess so far; finite and above zero, whatever was observed."""
        self._measured = Measurements((prior.step_seconds, prior.token_seconds, prior.pair_seconds))

    def observe(self, num_new_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """A step with one sequence took so long. What cannot be (no tokens, no time, NaN) is ignored."""
        self.observe_batch(num_new_tokens, num_pairs(num_new_tokens, num_context_tokens), seconds)

    def observe_batch(self, num_new_tokens: int, pairs: float, seconds: float) -> None:
        """A step with several sequences: the sums of their new tokens and of their `num_pairs`."""
        if num_new_tokens < 1 or not 0 < pairs < math.inf or not _is_measurable(seconds):
            return
        self._measured.add((1.0, float(num_new_tokens), float(pairs)), seconds)
        self.cost = PrefillCost(*self._measured.rates)


class FetchEstimator:
    """Learns a `FetchCost` from fetches that ended well. One thread observes, any may read `cost`."""

    def __init__(self, prior: FetchCost = DEFAULT_FETCH_COST) -> None:
        self.cost = prior
        """The best guess so far; finite, and above zero but for a disk that was never read."""
        self._measured = Measurements((prior.latency_seconds, 1.0 / prior.bytes_per_second))
        self._disk_rates: deque[float] = deque(maxlen=32)

    def observe(
        self, num_bytes: int, seconds: float, *, num_sharing: int = 1, num_disk_bytes: int = 0
    ) -> None:
        """A fetch of `num_bytes`, so many of them from disk, took so long while `num_sharing` shared the way.
        What cannot be (no bytes, no time, NaN) is ignored."""
        if num_bytes < 1 or num_sharing < 1 or num_disk_bytes < 0 or not _is_measurable(seconds):
            return
        if num_disk_bytes:
            self._observe_disk(num_bytes, num_disk_bytes, seconds, num_sharing)
        else:
            self._measured.add((1.0, float(num_bytes) * num_sharing), seconds)
        latency_seconds, byte_seconds = self._measured.rates
        disk_rate = (
            float(np.median(self._disk_rates)) if self._disk_rates else self.cost.disk_bytes_per_second
        )
        self.cost = FetchCost(latency_seconds, 1.0 / byte_seconds, disk_rate)

    def _observe_disk(self, num_bytes: int, num_disk_bytes: int, seconds: float, num_sharing: int) -> None:
        """Where the fetch took longer than the Link explains, the disk was what it waited for."""
        link_seconds = streaming_seconds(self.cost, num_bytes) * num_sharing
        reading = max(seconds - self.cost.latency_seconds, link_seconds)
        self._disk_rates.append(num_disk_bytes * num_sharing / reading)


def _is_measurable(seconds: float) -> bool:
    return LEAST_SECONDS <= seconds <= MOST_SECONDS
