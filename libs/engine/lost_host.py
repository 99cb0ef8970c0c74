"""A host is gone, and with it the KV that lay there: everything comes home, and is computed again."""

from collections.abc import Collection

from libs.engine.home import Home
from libs.engine.hosting.port import HostLost
from libs.engine.outputs import SequenceFailed
from libs.engine.sequence import Sequence, SequenceState
from libs.engine.travelled_weights import restored
from libs.request.outcome import FailureReason


def lose_host(home: Home, worker: str, why: str, cut: Collection[Sequence]) -> list[SequenceFailed]:
    """Begun sequences are preempted, and no block is found by name any more. Fails those that cannot be
    computed again: whose KV comes from outside, and `cut` ones, of which some layers have left in the step
    that broke. Nothing where the worker holds no module.

    Weights that had travelled are read again here, on the engine's thread: it runs no step for as long as
    that takes, 0.3 to 2 s. Raises WeightsLost, with nothing changed, where they cannot be.
    """
    before = home.arrangement.placement
    lost = [one for one in before.placed if one.worker == worker]
    if not lost:
        return []
    model = restored(home.runner.model, lost)
    detail = str(HostLost(worker, why))
    failing = [one for one in home.ledger.sequences.values() if one in cut or _awaits_kv(one)]
    failed = [home.ledger.fail(one, FailureReason.PEER_LOST, detail) for one in failing]
    home.ledger.preempt_all()
    home.ledger.allocator.forget_cached()
    home.loading.forget_ended()
    placement = before.without_worker(worker)
    dropped = sum(home.weights.num_bytes(one.move_id) for one in lost)
    if not home.arrangement.can_change(home.arrangement.num_blocks_of(placement, num_dropped_bytes=dropped)):
        reserved = [one for one in home.ledger.sequences.values() if not one.is_begun]
        failed += [home.ledger.fail(one, FailureReason.PEER_LOST, detail) for one in reserved]
    home.arrangement.change(placement, model, num_dropped_bytes=dropped)
    for one in lost:
        home.weights.came_back(one.move_id)
    home.on_placement(placement, f"{worker}: {why}")
    return failed


def _awaits_kv(sequence: Sequence) -> bool:
    """Whether KV is there, or on its way, that nobody here could compute."""
    if sequence.is_begun:
        return sequence.is_loading
    return sequence.state is SequenceState.LOADING or sequence.num_found_blocks > 0
