"""When requests come: seconds after the start, rising, without end. Equal seeds give equal times. Pure."""

import itertools
import random
from collections.abc import Iterator


def constant(rate: float) -> Iterator[float]:
    """Evenly spaced, `rate` per second, the first at once; infinitely many at once for an infinite rate."""
    return (number / rate for number in itertools.count())


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Independent arrivals: the gaps are exponential."""
    return bursty(rate, 1.0, seed)


def bursty(rate: float, burstiness: float, seed: int = 0) -> Iterator[float]:
    """Gaps from a gamma distribution of shape `burstiness`: 1 is Poisson, less comes in bursts, more is even.

    The variance of the gaps is 1 / burstiness times the square of their mean.
    """
    drawn = random.Random(f"gaps-{seed}")
    gaps = (drawn.gammavariate(burstiness, 1.0 / (burstiness * rate)) for _ in itertools.count())
    return itertools.accumulate(gaps)


def on_off(rate: float, on_seconds: float, off_seconds: float, seed: int = 0) -> Iterator[float]:
    """Poisson for `on_seconds`, silence for `off_seconds`, and so on; `rate` is the mean over both."""
    cycle_seconds = on_seconds + off_seconds
    for busy in poisson(rate * cycle_seconds / on_seconds, seed):
        num_cycles, rest = divmod(busy, on_seconds)
        yield num_cycles * cycle_seconds + rest
