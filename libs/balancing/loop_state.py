"""What the loop remembers from one round to the next. A new leader begins with an empty one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from libs.balancing.device_load import Smoothed, smooth
from libs.balancing.ledger import update_ledger
from libs.balancing.mesh_view import BringHome, Decision, Flip, MeshView, MoveAway, UnderWay
from libs.balancing.settings import BalancingSettings


@dataclass(frozen=True, slots=True)
class LoopState:
    """Times are those of `now`."""

    number: int = 0
    loads: Mapping[str, Smoothed] = field(default_factory=dict[str, Smoothed])
    """By worker."""
    is_balancing: bool = False
    num_calm_rounds: int = 0
    """In which the gap stayed below `delta_lo`."""
    rests_until: Mapping[str, float] = field(default_factory=dict[str, float])
    """By worker: no move of the loop begins there before."""
    shunned_until: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """By home and host, after a move from one to the other came to nothing."""
    under_way: tuple[UnderWay, ...] = ()
    ledger: Mapping[str, float] = field(default_factory=dict[str, float])
    """By move: since when the module that it brought away has been seen there."""
    flips_rest_until: float = float("-inf")


def look(state: LoopState, view: MeshView, settings: BalancingSettings, now: float) -> LoopState:
    """The state with this round's loads. Who is new rests until its load has been smoothed, who took part in
    a move that ended rests for the cooldown."""
    loads = {
        device.worker: smooth(state.loads.get(device.worker), device, now, settings)
        for device in view.devices
    }
    rests = {worker: until for worker, until in state.rests_until.items() if until > now and worker in loads}
    for worker in loads.keys() - state.loads.keys():
        rests[worker] = now + 2 * settings.smoothing_seconds
    shunned = {pair: until for pair, until in state.shunned_until.items() if until > now}
    going_on = {move.move_id for move in view.under_way}
    for move in state.under_way:
        if move.move_id not in going_on:
            rests |= dict.fromkeys((move.instance, move.host), now + settings.cooldown_seconds)
    return replace(
        state,
        number=state.number + 1,
        loads=loads,
        rests_until=rests,
        shunned_until=shunned,
        under_way=view.under_way,
        ledger=update_ledger(state.ledger, view, now),
    )


def after(state: LoopState, decision: Decision, settings: BalancingSettings, now: float) -> LoopState:
    """The state once this was decided. Those who take part rest, whatever comes of it."""
    workers: tuple[str, ...]
    match decision:
        case MoveAway(instance, host) | BringHome(instance, host):
            workers = (instance, host)
        case Flip(worker):
            state = replace(state, flips_rest_until=now + settings.flip_cooldown_seconds)
            workers = (worker,)
        case None:
            return state
    rests = dict(state.rests_until) | dict.fromkeys(workers, now + settings.cooldown_seconds)
    return replace(state, rests_until=rests)


def shun(state: LoopState, home: str, host: str, settings: BalancingSettings, now: float) -> LoopState:
    """The state once a move from home to host was denied or failed: the reason may still hold."""
    shunned = {**state.shunned_until, (home, host): now + settings.retry_seconds}
    return replace(state, shunned_until=shunned)
