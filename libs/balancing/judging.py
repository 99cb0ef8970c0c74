"""Whether a candidate pays: what it brings over the horizon against what it costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from libs.balancing.device_load import Smoothed, utilization
from libs.balancing.mesh_view import BringHome, Device, Flip, MeshView, MoveAway, Role
from libs.balancing.prediction import Predicted, peak, predict_away, predict_home
from libs.balancing.settings import BalancingSettings

PAYS = "pays"

ROOM_ABOVE_USED = 1.1
"""A move leaves at least so many blocks for each one in use: sequences grow while it goes on."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate and what is thought of it. Benefit and cost are seconds of a whole device."""

    move: MoveAway | BringHome | Flip
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


def judge_move(
    move: MoveAway | BringHome,
    home: Device,
    host: Device,
    loads: Mapping[str, Smoothed],
    settings: BalancingSettings,
) -> Judged:
    """A move that is to lower the greater utilization of its two devices."""
    if isinstance(move, MoveAway):
        predicted = predict_away(move, home, host, loads, settings)
        source, target = loads[home.worker].load, utilization(predicted.host, settings)
    else:
        predicted = predict_home(move, home, host, loads, settings)
        source, target = loads[host.worker].load, utilization(predicted.home, settings)
    source_utilization = utilization(source, settings)
    gain = source_utilization - peak(predicted, settings)
    benefit, cost = gain * settings.horizon_seconds, _cost(predicted, settings)
    if predicted.move_seconds > settings.max_move_seconds:
        verdict = f"would take {predicted.move_seconds:.1f} s, more than {settings.max_move_seconds:g} s"
    elif why := _lacks_room(home, predicted):
        verdict = why
    elif target >= source_utilization:
        verdict = "its target would be as loaded as its source is"
    else:
        verdict = _worth(gain, benefit, cost, settings)
    return Judged(move, benefit, cost, predicted.move_seconds, predicted.overhead_seconds, verdict)


def judge_flip(
    flip: Flip, view: MeshView, loads: Mapping[str, Smoothed], settings: BalancingSettings
) -> Judged:
    """A flip spreads the load of each role over one worker more, or less."""

    def total(role: Role) -> tuple[float, int]:
        of_role = [loads[d.worker].load for d in view.devices if d.role is role]
        return sum(utilization(load, settings) for load in of_role), len(of_role)

    leaving = Role.DECODE if flip.to is Role.PREFILL else Role.PREFILL
    (left_load, num_left), (joined_load, num_joined) = total(leaving), total(flip.to)
    before = max(left_load / num_left, joined_load / max(1, num_joined))
    gain = before - max(left_load / max(1, num_left - 1), joined_load / (num_joined + 1))
    benefit = gain * settings.horizon_seconds
    cost = settings.flip_seconds * (settings.move_impact + utilization(loads[flip.worker].load, settings))
    verdict = _worth(gain, benefit, cost, settings)
    if not num_joined:
        verdict = f"no {flip.to.value} worker tells how loaded that role is"
    if num_left < 2:
        verdict = f"the last {leaving.value} worker stays one"
    return Judged(flip, benefit, cost, settings.flip_seconds, 0.0, verdict)


def judge_return(
    move: BringHome,
    home: Device,
    host: Device,
    loads: Mapping[str, Smoothed],
    settings: BalancingSettings,
) -> Judged:
    """Giving back in calm times: the mesh has to stay as calm as that, by what is predicted."""
    predicted = predict_home(move, home, host, loads, settings)
    after = {worker: utilization(one.load, settings) for worker, one in loads.items()}
    peak_before = max(after.values())
    after[home.worker] = utilization(predicted.home, settings)
    after[host.worker] = utilization(predicted.host, settings)
    gap = max(after.values()) - min(after.values())
    if why := _lacks_room(home, predicted):
        verdict = why
    elif gap >= settings.delta_lo:
        verdict = f"the gap would be {gap:.2f}, not below {settings.delta_lo:g}"
    elif max(after.values()) > max(peak_before, settings.calm_utilization):
        verdict = f"the peak would rise to {max(after.values()):.2f}"
    else:
        verdict = PAYS
    benefit = -predicted.added_share * settings.horizon_seconds * settings.overhead_impact
    cost = predicted.move_seconds * settings.move_impact
    return Judged(move, benefit, cost, predicted.move_seconds, predicted.overhead_seconds, verdict)


def _cost(predicted: Predicted, settings: BalancingSettings) -> float:
    """Steps that take longer are felt by whoever waits for tokens; where they then take more than all time
    there is, fewer of them are run."""
    slowed = max(0.0, predicted.added_share) / (1 + max(0.0, predicted.added_share))
    lost = max(0.0, 1 - 1 / predicted.occupancy) if predicted.occupancy > 1 else 0.0
    if predicted.added_share <= 0:
        lost = 0.0  # whatever is lost is lost already, and less of it afterwards
    return predicted.move_seconds * settings.move_impact + settings.horizon_seconds * (
        slowed * settings.overhead_impact + lost
    )


def _lacks_room(home: Device, predicted: Predicted) -> str:
    """Empty where the home's pool stays as large as it is, or large enough for what it holds, and more."""
    used = home.num_used_blocks
    wanted = min(home.num_blocks, 2 * used + home.num_least_blocks)
    least = max(wanted, int(used * ROOM_ABOVE_USED))
    if predicted.num_blocks >= least:
        return ""
    return f"would leave {predicted.num_blocks} blocks, less than {least}"


def _worth(gain: float, benefit: float, cost: float, settings: BalancingSettings) -> str:
    if gain < settings.min_gain:
        is_told_as_none = gain < 0.0005
        return "would not lower the peak" if is_told_as_none else f"would lower the peak by {gain:.3f} only"
    if benefit <= (1 + settings.benefit_margin) * cost:
        return "costs more than it brings"
    return PAYS
