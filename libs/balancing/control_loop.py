"""One round of the loop that keeps devices alike loaded: a view in; at most one move out, and the reasons.

Pure: `now` is unix seconds, told by whoever calls. Hysteresis, cooldowns and a least gain keep it from
swinging; what it moved it gives back when nothing has been out of balance for long.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from libs.balancing.candidates import moves_away, role_flips, ways_home
from libs.balancing.device_load import utilization
from libs.balancing.judging import Judged, judge_flip, judge_move, judge_return
from libs.balancing.loop_state import LoopState, after, look
from libs.balancing.mesh_view import BringHome, Decision, Device, Flip, MeshView, MoveAway
from libs.balancing.settings import BalancingSettings
from libs.balancing.wording import move_in_words
from libs.bus.messages.migration import CandidateSeen, DeviceSeen, RoundSeen

NUM_ENDS = 3
"""So many of the most and of the least loaded devices are considered with each other."""
NUM_SHOWN = 24
"""Candidates that a round tells of, the best first."""


def decide(
    view: MeshView, state: LoopState, settings: BalancingSettings, now: float
) -> tuple[Decision, LoopState, RoundSeen]:
    """What to move now, the state for the next round, and what was seen and considered."""
    state = look(state, view, settings, now)
    gap = mesh_gap(view, state, settings)
    state = replace(
        state,
        is_balancing=gap >= (settings.delta_lo if state.is_balancing else settings.delta_hi),
        num_calm_rounds=state.num_calm_rounds + 1 if gap < settings.delta_lo else 0,
    )
    taken, judged, why = _choose(view, state, settings, gap, now)
    if taken and not settings.acts:
        taken, why = None, f"stays, since it only watches; else: {why}"
    decision = taken.move if taken else None
    state = after(state, decision, settings, now)
    seen = RoundSeen(
        number=state.number,
        unix_seconds=now,
        devices=tuple(_device_seen(device, state, settings) for device in view.devices),
        gap=gap,
        is_balancing=state.is_balancing,
        candidates=tuple(_candidate_seen(one, one is taken) for one in _best_first(judged)[:NUM_SHOWN]),
        decision=why,
    )
    return decision, state, seen


def mesh_gap(view: MeshView, state: LoopState, settings: BalancingSettings) -> float:
    """Largest less least utilization among workers of one model; of several models the greatest such gap."""
    by_model: dict[str, list[float]] = {}
    for device in view.devices:
        by_model.setdefault(device.fingerprint, []).append(_utilization(device, state, settings))
    return max((max(values) - min(values) for values in by_model.values()), default=0.0)


def _choose(
    view: MeshView, state: LoopState, settings: BalancingSettings, gap: float, now: float
) -> tuple[Judged | None, list[Judged], str]:
    """The candidate that is taken, all that were judged, and the decision in words."""
    if len(view.under_way) >= settings.max_moves:
        return None, [], f"stays: {len(view.under_way)} of {settings.max_moves} moves are under way"
    devices = _rested(view, state)
    if state.is_balancing:
        judged = list(_judge_all(view, devices, state, settings, now))
        taken = max((one for one in judged if one.pays), key=lambda one: one.net, default=None)
        reason = f"gap {gap:.2f}"
    elif state.num_calm_rounds >= settings.calm_rounds:
        judged = list(_judge_returns(devices, state, settings, now))
        taken = next((one for one in judged if one.pays), None)
        reason = f"calm for {state.num_calm_rounds} rounds"
    else:
        threshold = settings.delta_hi if gap >= settings.delta_lo else settings.delta_lo
        return None, [], f"stays: gap {gap:.2f} is below {threshold:g}"
    if taken is not None:
        return taken, judged, f"{_what(taken, view)}: {reason}"
    if judged:
        return None, judged, f"stays: {reason}, but no candidate pays"
    return None, judged, f"stays: {reason}, and nothing can move now"


def _rested(view: MeshView, state: LoopState) -> list[Device]:
    """Devices that neither rest nor take part in a move, the most loaded first."""
    moving = {worker for move in view.under_way for worker in (move.instance, move.host)}
    return [one for one in view.devices if one.worker not in moving and one.worker not in state.rests_until]


def _judge_all(
    view: MeshView, devices: list[Device], state: LoopState, settings: BalancingSettings, now: float
) -> Iterator[Judged]:
    movable = _movable(state, settings, now)
    for source, target in _pairs(devices, state, settings):
        gap = _utilization(source, state, settings) - _utilization(target, state, settings)
        moves: Iterable[MoveAway | BringHome] = ways_home(target, source, movable)
        for move in moves:
            yield judge_move(move, target, source, state.loads, settings)
        if target.can_host and (source.worker, target.worker) not in state.shunned_until:
            moves = moves_away(source, target, state.loads[source.worker].load, settings, gap=gap)
            for move in moves:
                yield judge_move(move, source, target, state.loads, settings)
    if settings.flips_roles and now >= state.flips_rest_until:
        rested = {device.worker for device in devices}
        for flip in role_flips(view):
            if flip.worker in rested:
                yield judge_flip(flip, view, state.loads, settings)


def _pairs(
    devices: list[Device], state: LoopState, settings: BalancingSettings
) -> Iterator[tuple[Device, Device]]:
    """Those that are far apart, of the most loaded with the least loaded of the same model."""
    ranked = sorted(devices, key=lambda one: _utilization(one, state, settings), reverse=True)
    for source in ranked[:NUM_ENDS]:
        alike = [one for one in ranked if one.fingerprint == source.fingerprint and one is not source]
        for target in alike[-NUM_ENDS:]:
            gap = _utilization(source, state, settings) - _utilization(target, state, settings)
            if gap >= settings.delta_lo:
                yield source, target


def _judge_returns(
    devices: list[Device], state: LoopState, settings: BalancingSettings, now: float
) -> Iterator[Judged]:
    """What the loop moved, the oldest first."""
    by_worker = {device.worker: device for device in devices}
    movable = _movable(state, settings, now)
    owners = {
        one.move_id: (device, by_worker[one.worker])
        for device in devices
        for one in device.placement.placed
        if one.move_id in movable and one.worker in by_worker
    }
    for move_id in state.ledger:
        if move_id in owners:
            home, host = owners[move_id]
            for move in ways_home(home, host, frozenset({move_id})):
                yield judge_return(move, home, host, state.loads, settings)


def _movable(state: LoopState, settings: BalancingSettings, now: float) -> frozenset[str]:
    """What the loop moved long enough ago."""
    return frozenset(
        move_id for move_id, since in state.ledger.items() if now - since >= settings.cooldown_seconds
    )


def _utilization(device: Device, state: LoopState, settings: BalancingSettings) -> float:
    return utilization(state.loads[device.worker].load, settings)


def _best_first(judged: list[Judged]) -> list[Judged]:
    return sorted(judged, key=lambda one: (one.pays, one.net), reverse=True)


def _what(taken: Judged, view: MeshView) -> str:
    names = {device.worker: device.name for device in view.devices}
    move = taken.move
    if isinstance(move, Flip):
        return f"{names[move.worker]} flips to {move.to.value}"
    home, host = names[move.instance], names[move.host]
    source, target = (home, host) if isinstance(move, MoveAway) else (host, home)
    return f"{move_in_words(move)} from {source} to {target}"


def _device_seen(device: Device, state: LoopState, settings: BalancingSettings) -> DeviceSeen:
    load = state.loads[device.worker].load
    return DeviceSeen(
        worker=device.worker,
        name=device.name,
        role=device.role.value,
        compute=load.compute,
        memory=load.memory,
        queue=load.queue,
        utilization=utilization(load, settings),
    )


def _candidate_seen(judged: Judged, is_taken: bool) -> CandidateSeen:
    move = judged.move
    verdict = "taken" if is_taken else "another is better" if judged.pays else judged.verdict
    return CandidateSeen(
        instance=move.worker if isinstance(move, Flip) else move.instance,
        host="" if isinstance(move, Flip) else move.host,
        what=move_in_words(move),
        benefit=judged.benefit,
        cost=judged.cost,
        move_seconds=judged.move_seconds,
        overhead_seconds=judged.overhead_seconds,
        verdict=verdict,
    )
