"""What moves of this instance's modules work on."""

from collections.abc import Callable
from dataclasses import dataclass

from libs.engine.forward.loading import LoadingSteps
from libs.engine.forward.remote_kv import Hosts, WholeKv
from libs.engine.forward.runner import Runner
from libs.engine.memory.pool import Pool
from libs.engine.migration.layout import Arrangement
from libs.engine.migration.travelled_weights import TravelledWeights
from libs.engine.scheduling.sequence_table import Ledger
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
