"""What the loop remembers from one round to the next. A new leader begins with an empty state."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from libs.balancing.device_model import SMOOTHING_SECONDS, smooth
from libs.balancing.view import Decision, Device, Flip, Inbound, MeshView, Outbound, UnderWay
from libs.placement.migration import is_automatic

COOLDOWN_SECONDS = 4.0
"""Both devices of a migration rest for so long: at least twice SMOOTHING_SECONDS, since sooner the load that
is seen is still that from before."""
RETRY_SECONDS = 30.0
"""After a migration that was denied or failed, none between these workers begins."""
FLIP_COOLDOWN_SECONDS = 60.0
"""Between two changes of roles."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """Times are those of `now`."""

    number: int = 0
    devices: Mapping[str, Device] = field(default_factory=dict[str, Device])
    """By worker, with smoothed loads."""
    seen_at: float = 0.0
    is_balancing: bool = False
    num_calm_rounds: int = 0
    """In which the gap stayed below `delta_lo`."""
    rests_until: Mapping[str, float] = field(default_factory=dict[str, float])
    """By worker: no migration of the loop begins there before."""
    backs_off_until: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """By owner and host, after a migration from one to the other came to nothing."""
    under_way: tuple[UnderWay, ...] = ()
    automatic: Mapping[str, float] = field(default_factory=dict[str, float])
    """Since when each module that the loop brought away has been seen there, by its migration, the oldest
    first. The placements say which they are, so that a new leader knows them."""
    flips_rest_until: float = float("-inf")


def observe(state: LoopState, view: MeshView, now: float) -> LoopState:
    """The state with this round's loads. Who is new rests until its load has been smoothed, who took part in
    a migration that ended rests for the cooldown."""
    seconds = now - state.seen_at
    devices = {one.worker: smooth(state.devices.get(one.worker), one, seconds) for one in view.devices}
    rests = {
        worker: until for worker, until in state.rests_until.items() if until > now and worker in devices
    }
    for worker in devices.keys() - state.devices.keys():
        rests[worker] = now + 2 * SMOOTHING_SECONDS
    going_on = {move.move_id for move in view.under_way}
    for move in state.under_way:
        if move.move_id not in going_on:
            rests |= dict.fromkeys((move.instance, move.host), now + COOLDOWN_SECONDS)
    away = sorted(one.move_id for device in view.devices for one in device.placement.placed)
    return replace(
        state,
        number=state.number + 1,
        devices=devices,
        seen_at=now,
        rests_until=rests,
        backs_off_until={pair: until for pair, until in state.backs_off_until.items() if until > now},
        under_way=view.under_way,
        automatic={one: state.automatic.get(one, now) for one in away if is_automatic(one)},
    )


def apply(state: LoopState, decision: Decision, now: float) -> LoopState:
    """The state once this was decided. Those who take part rest, whatever comes of it."""
    workers: tuple[str, ...]
    match decision:
        case Outbound(instance, host) | Inbound(instance, host):
            workers = (instance, host)
        case Flip(worker):
            state = replace(state, flips_rest_until=now + FLIP_COOLDOWN_SECONDS)
            workers = (worker,)
        case None:
            return state
    rests = dict(state.rests_until) | dict.fromkeys(workers, now + COOLDOWN_SECONDS)
    return replace(state, rests_until=rests)


def back_off(state: LoopState, owner: str, host: str, now: float) -> LoopState:
    """The state once a migration from owner to host was denied or failed: the reason may still hold."""
    return replace(state, backs_off_until={**state.backs_off_until, (owner, host): now + RETRY_SECONDS})
