"""One load through several policies, each on a cluster of its own."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from libs.routing.policies import POLICIES
from libs.simulator.cluster import Cluster
from libs.simulator.report import Report
from libs.simulator.settings import SimulatorSettings
from libs.simulator.synthetic import make_load
from libs.simulator.trace import TraceRequest, check_blocks, read_trace

Watch = Callable[[Sequence[TraceRequest], str], Iterable[TraceRequest]]
"""Hands requests through, and shows how many of them have come; the text says what for."""


class UnknownPolicy(Exception):
    """Routing has no policy of this name."""


def compare(settings: SimulatorSettings, watch: Watch = lambda requests, policy: requests) -> list[Report]:
    """A report for each policy that is asked for. Equal settings give equal reports.

    Raises UnknownPolicy; BadTrace and OSError where the trace cannot be read; ValueError for a load or a
    cluster that cannot be.
    """
    names = settings.policy or tuple(POLICIES)
    for name in names:
        if name not in POLICIES:
            raise UnknownPolicy(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    requests = requests_to_replay(settings)
    return [_replay(requests, settings, name, watch) for name in names]


def requests_to_replay(settings: SimulatorSettings) -> list[TraceRequest]:
    """Of the trace that is named, or made up."""
    if settings.trace:
        paths = [Path(path).expanduser() for path in settings.trace]
        requests = read_trace(paths, speed_up=settings.speed_up, max_requests=settings.requests or None)
        check_blocks(requests, settings.block_size)
        return requests
    return make_load(settings.load(), block_size=settings.block_size, seed=settings.seed)


def _replay(requests: Sequence[TraceRequest], settings: SimulatorSettings, name: str, watch: Watch) -> Report:
    cluster = Cluster(settings.shape(), POLICIES[name], seed=settings.seed)
    cluster.replay(watch(requests, name))
    return cluster.report(name)
