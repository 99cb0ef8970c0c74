"""Whether a candidate pays: what it brings over the horizon against what it costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from libs.balancing.device_model import Predicted, predict_inbound, predict_outbound
from libs.balancing.view import Device, Flip, Inbound, Outbound
from libs.placement.role import Role

PAYS = "pays"

HORIZON_SECONDS = 30.0
"""Over how long a migration has to pay for itself."""
MIN_GAIN = 0.03
"""It has to lower the greater utilization of its two devices by so much."""
BENEFIT_MARGIN = 0.1
"""Its benefit has to exceed its cost by this share."""
MIGRATION_IMPACT = 0.2
"""Share of a device that it takes while it goes on."""
OVERHEAD_IMPACT = 0.25
"""What a second by which steps get longer costs, in seconds of a device."""
MAX_MIGRATION_SECONDS = 10.0
"""Those that are expected to take longer do not begin."""
ROOM_ABOVE_USED = 1.1
"""It leaves at least so many blocks for each one in use: sequences grow while it goes on."""
CALM_UTILIZATION = 0.4
"""No device is to exceed this by what is given back."""
FLIP_SECONDS = 10.0
"""How long a worker is expected to be away to change its role."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate and what is thought of it. Benefit and cost are seconds of a whole device."""

    move: Outbound | Inbound | Flip
    benefit: float
    cost: float
    move_seconds: float
    overhead_seconds: float
    verdict: str
    """`PAYS`, or why it does not."""

    @property
    def pays(self) -> bool:
        """Whether it may be taken."""
        return self.verdict == PAYS

    @property
    def net(self) -> float:
        """By which the best is chosen."""
        return self.benefit - self.cost


def score_migration(move: Outbound | Inbound, owner: Device, host: Device) -> Scored:
    """One that is to lower the greater utilization of its two devices."""
    if isinstance(move, Outbound):
        predicted = predict_outbound(move, owner, host)
        source, target = owner.load.utilization, predicted.host.utilization
    else:
        predicted = predict_inbound(move, owner, host)
        source, target = host.load.utilization, predicted.owner.utilization
    gain = source - predicted.peak
    benefit, cost = gain * HORIZON_SECONDS, _cost(predicted)
    if predicted.move_seconds > MAX_MIGRATION_SECONDS:
        verdict = f"would take {predicted.move_seconds:.1f} s, more than {MAX_MIGRATION_SECONDS:g} s"
    elif why := _lacks_room(owner, predicted):
        verdict = why
    elif target >= source:
        verdict = "its target would be as loaded as its source is"
    else:
        verdict = worth(gain, benefit, cost)
    return Scored(move, benefit, cost, predicted.move_seconds, predicted.overhead_seconds, verdict)


def score_flip(flip: Flip, devices: Mapping[str, Device]) -> Scored:
    """A flip spreads the load of each role over one worker more, or less."""

    def total(role: Role) -> tuple[float, int]:
        of_role = [one.load.utilization for one in devices.values() if one.role is role]
        return sum(of_role), len(of_role)

    leaving = Role.DECODE if flip.to is Role.PREFILL else Role.PREFILL
    (left_load, num_left), (joined_load, num_joined) = total(leaving), total(flip.to)
    before = max(left_load / num_left, joined_load / max(1, num_joined))
    gain = before - max(left_load / max(1, num_left - 1), joined_load / (num_joined + 1))
    benefit = gain * HORIZON_SECONDS
    cost = FLIP_SECONDS * (MIGRATION_IMPACT + devices[flip.worker].load.utilization)
    verdict = worth(gain, benefit, cost)
    if not num_joined:
        verdict = f"no {flip.to.value} worker tells how loaded that role is"
    if num_left < 2:
        verdict = f"the last {leaving.value} worker stays one"
    return Scored(flip, benefit, cost, FLIP_SECONDS, 0.0, verdict)


def score_return(
    move: Inbound, owner: Device, host: Device, devices: Mapping[str, Device], *, max_gap: float
) -> Scored:
    """Giving back in calm times: the mesh has to stay as calm as that, by what is predicted."""
    predicted = predict_inbound(move, owner, host)
    after = {worker: one.load.utilization for worker, one in devices.items()}
    peak_before = max(after.values())
    after[owner.worker], after[host.worker] = predicted.owner.utilization, predicted.host.utilization
    gap = max(after.values()) - min(after.values())
    if why := _lacks_room(owner, predicted):
        verdict = why
    elif gap >= max_gap:
        verdict = f"the gap would be {gap:.2f}, not below {max_gap:g}"
    elif max(after.values()) > max(peak_before, CALM_UTILIZATION):
        verdict = f"the peak would rise to {max(after.values()):.2f}"
    else:
        verdict = PAYS
    benefit = -predicted.added_share * HORIZON_SECONDS * OVERHEAD_IMPACT
    cost = predicted.move_seconds * MIGRATION_IMPACT
    return Scored(move, benefit, cost, predicted.move_seconds, predicted.overhead_seconds, verdict)


def worth(gain: float, benefit: float, cost: float) -> str:
    """`PAYS`, or why so little gain, or so little benefit for its cost, does not."""
    if gain < MIN_GAIN:
        is_none_in_figures = gain < 0.0005
        return (
            "would not lower the peak" if is_none_in_figures else f"would lower the peak by {gain:.3f} only"
        )
    if benefit <= (1 + BENEFIT_MARGIN) * cost:
        return "costs more than it brings"
    return PAYS


def _cost(predicted: Predicted) -> float:
    """Steps that take longer are felt by whoever waits for tokens; where they then take more than all time
    there is, fewer of them are run."""
    occupancy = predicted.owner.occupancy
    slowed = max(0.0, predicted.added_share) / (1 + max(0.0, predicted.added_share))
    lost = max(0.0, 1 - 1 / occupancy) if occupancy > 1 else 0.0
    if predicted.added_share <= 0:
        lost = 0.0  # whatever is lost is lost already, and less of it afterwards
    return predicted.move_seconds * MIGRATION_IMPACT + HORIZON_SECONDS * (slowed * OVERHEAD_IMPACT + lost)


def _lacks_room(owner: Device, predicted: Predicted) -> str:
    """Empty where the owner's pool stays as large as it is, or large enough for what it holds, and more."""
    used = owner.num_used_blocks
    wanted = min(owner.num_blocks, 2 * used + owner.num_least_blocks)
    least = max(wanted, int(used * ROOM_ABOVE_USED))
    if predicted.num_blocks >= least:
        return ""
    return f"would leave {predicted.num_blocks} blocks, less than {least}"
