"""Made-up load: prompts that share prefixes as Zipf says, arriving steadily, at random or in bursts."""

from enum import Enum

import msgspec
import numpy as np
from numpy.typing import NDArray

from libs.kv.names import NAME_BYTES
from libs.simulator.trace import TraceRequest


class Arrivals(Enum):
    """How requests are spread over time."""

    CONSTANT = "constant"
    POISSON = "poisson"
    BURSTY = "bursty"
    """Gamma-distributed gaps whose deviation is `BURST_VARIATION` times their mean."""


BURST_VARIATION = 4.0


class SyntheticLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests are like. Lengths of the own part and of the answer are spread exponentially."""

    num_requests: int = 1000
    requests_per_second: float = 10.0
    arrivals: Arrivals = Arrivals.POISSON
    num_prefixes: int = 64
    zipf_exponent: float = 1.2
    """Prefix number k (from 1) is asked for with weight k ** -exponent; 0: all alike."""
    num_prefix_tokens: int = 2048
    num_own_tokens: int = 256
    """Mean of what comes behind the shared prefix."""
    num_output_tokens: int = 64
    """Mean."""


def make_load(load: SyntheticLoad, *, block_size: int, seed: int) -> list[TraceRequest]:
    """The same requests for the same arguments. Raises ValueError for a load that cannot be."""
    if load.num_requests < 1 or load.num_prefixes < 1 or not load.requests_per_second > 0:
        raise ValueError(
            f"a load has requests, prefixes and a rate: got {load.num_requests} requests, "
            f"{load.num_prefixes} prefixes, {load.requests_per_second} requests/s"
        )
    noise = np.random.default_rng(seed)
    arrivals = np.cumsum(_gaps(load, noise))
    weights = np.arange(1, load.num_prefixes + 1, dtype=np.float64) ** -load.zipf_exponent
    prefixes = noise.choice(load.num_prefixes, size=load.num_requests, p=weights / weights.sum())
    own = _lengths(load.num_own_tokens, load.num_requests, noise)
    output = _lengths(load.num_output_tokens, load.num_requests, noise)
    return [
        TraceRequest(
            float(arrivals[number] - arrivals[0]),
            load.num_prefix_tokens + int(own[number]),
            int(output[number]),
            _names(load.num_prefix_tokens, int(own[number]), int(prefixes[number]), number, block_size),
        )
        for number in range(load.num_requests)
    ]


def _gaps(load: SyntheticLoad, noise: np.random.Generator) -> NDArray[np.float64]:
    mean = 1.0 / load.requests_per_second
    if load.arrivals is Arrivals.CONSTANT:
        return np.full(load.num_requests, mean)
    if load.arrivals is Arrivals.POISSON:
        return noise.exponential(mean, load.num_requests)
    shape = BURST_VARIATION**-2
    return noise.gamma(shape, mean / shape, load.num_requests)


def _lengths(mean: int, count: int, noise: np.random.Generator) -> NDArray[np.int64]:
    return 1 + noise.exponential(max(0, mean - 1), count).astype(np.int64)


def _names(num_prefix: int, num_own: int, prefix: int, request: int, block_size: int) -> list[bytes]:
    """The prefix's full blocks are the same for all who share it; the others are the request's own."""
    num_shared = num_prefix // block_size
    num_blocks = (num_prefix + num_own) // block_size
    shared = [_name(b"P", prefix, block) for block in range(num_shared)]
    return shared + [_name(b"R", request, block) for block in range(num_shared, num_blocks)]


def _name(kind: bytes, owner: int, block: int) -> bytes:
    return kind + owner.to_bytes(8, "big") + block.to_bytes(NAME_BYTES - 9, "big")
