"""How long KV takes from a store to a worker."""

import msgspec


class FetchCost(msgspec.Struct, frozen=True):
    """What a fetch costs a worker: `latency + bytes / rate` seconds, the rate shared by concurrent
    fetches."""

    latency_seconds: float
    """Until the first byte: the question, its answer, the store's queue."""
    bytes_per_second: float
    """From a store's memory into the worker's pool."""
    disk_bytes_per_second: float = 0.0
    """From a store's disk into its memory, at the same time as what was read before travels; 0: not known
    yet, taken to be as fast as the rest."""


DEFAULT_FETCH_COST = FetchCost(latency_seconds=1e-3, bytes_per_second=1e9)
"""Before anything was measured: the order of a loopback or 10 Gbit/s link."""


def fetch_seconds(
    cost: FetchCost, num_bytes: float, *, num_sharing: int = 1, num_disk_bytes: float = 0
) -> float:
    """Seconds until `num_bytes` are there, `num_disk_bytes` of them from a disk, while `num_sharing` fetches
    (this one counts) share the rates; 0 for no bytes.

    Raises ValueError for negative bytes or nobody sharing.
    """
    if num_bytes < 0 or num_disk_bytes < 0 or num_sharing < 1:
        raise ValueError(
            f"bytes cannot be negative and a fetch shares at least with itself: got {num_bytes} bytes, "
            f"{num_disk_bytes} from disk, {num_sharing} sharing"
        )
    if num_bytes == 0:
        return 0.0
    return cost.latency_seconds + num_sharing * streaming_seconds(cost, num_bytes, num_disk_bytes)


def streaming_seconds(cost: FetchCost, num_bytes: float, num_disk_bytes: float = 0) -> float:
    """The same without latency and sharing: the slower of Link and disk, which work at the same time."""
    link_seconds = num_bytes / cost.bytes_per_second
    if num_disk_bytes and cost.disk_bytes_per_second:
        return max(link_seconds, num_disk_bytes / cost.disk_bytes_per_second)
    return link_seconds
