"""What moves of this instance's modules work on."""

from collections.abc import Callable
from dataclasses import dataclass

from libs.engine.arrangement import Arrangement
from libs.engine.hosts import Hosts
from libs.engine.ledger import Ledger
from libs.engine.loading import LoadingSteps
from libs.engine.pool import Pool
from libs.engine.runner import Runner
from libs.engine.travelled_weights import TravelledWeights
from libs.engine.whole_kv import WholeKv
from libs.placement.placement import Placement


@dataclass(frozen=True)
class Home:
    """The parts of one engine, owned by its thread."""

    pool: Pool
    ledger: Ledger
    hosts: Hosts
    runner: Runner
    loading: LoadingSteps
    arrangement: Arrangement
    weights: TravelledWeights
    on_placement: Callable[[Placement, str], None]
    """Hears of each new placement, and of a host that was lost, and why."""


def home_of(
    pool: Pool,
    ledger: Ledger,
    kv: WholeKv,
    runner: Runner,
    on_placement: Callable[[Placement, str], None],
) -> Home:
    """With everything at home."""
    loading = LoadingSteps(ledger, runner)
    arrangement = Arrangement(pool, ledger, kv, runner)
    return Home(pool, ledger, kv.hosts, runner, loading, arrangement, TravelledWeights(pool), on_placement)
