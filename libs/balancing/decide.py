"""One round of the loop that keeps devices alike loaded: a view in; at most one change out, and the reasons.

Pure: `now` is unix seconds, told by whoever calls. Hysteresis, cooldowns and a least gain keep it from
swinging; what it moved it gives back when nothing has been out of balance for long.
"""

from collections.abc import Iterator
from dataclasses import replace

from libs.balancing.candidates import inbound, outbound, role_flips
from libs.balancing.scoring import Scored, score_flip, score_migration, score_return
from libs.balancing.settings import BalancingSettings
from libs.balancing.state import COOLDOWN_SECONDS, LoopState, apply, observe
from libs.balancing.view import (
    CandidateReport,
    Decision,
    Device,
    DeviceSnapshot,
    Flip,
    Inbound,
    MeshView,
    Outbound,
    RoundReport,
)
from libs.placement.module import module_in_words

CALM_ROUNDS = 60
"""After so many rounds below `delta_lo` the oldest migration of the loop is undone."""
NUM_ENDS = 3
"""So many of the most and of the least loaded devices are considered with each other."""
NUM_SHOWN = 24
"""Candidates that a round tells of, the best first."""


def decide(
    view: MeshView, state: LoopState, settings: BalancingSettings, now: float
) -> tuple[Decision, LoopState, RoundReport]:
    """What to move now, the state for the next round, and what was seen and considered."""
    state = observe(state, view, now)
    gap = _mesh_gap(state)
    state = replace(
        state,
        is_balancing=gap >= (settings.delta_lo if state.is_balancing else settings.delta_hi),
        num_calm_rounds=state.num_calm_rounds + 1 if gap < settings.delta_lo else 0,
    )
    taken, scored, why = _choose(view, state, settings, gap, now)
    if taken and not settings.acts:
        taken, why = None, f"stays, since it only watches; else: {why}"
    decision = taken.move if taken else None
    state = apply(state, decision, now)
    best_first = sorted(scored, key=lambda one: (one.pays, one.net), reverse=True)
    report = RoundReport(
        number=state.number,
        unix_seconds=now,
        devices=tuple(map(_snapshot, state.devices.values())),
        gap=gap,
        is_balancing=state.is_balancing,
        candidates=tuple(_report(one, is_taken=one is taken) for one in best_first[:NUM_SHOWN]),
        decision=why,
    )
    return decision, state, report


def change_in_words(move: Outbound | Inbound | Flip) -> str:
    """`layers 20-29`, `layers 20-29 with weights`, `home: layers 20-29`, `flip to decode`."""
    match move:
        case Outbound(module=module, with_weights=with_weights):
            return module_in_words(module) + (" with weights" if with_weights else "")
        case Inbound(module=module):
            return f"home: {module_in_words(module)}"
        case Flip(to=to):
            return f"flip to {to.value}"


def _mesh_gap(state: LoopState) -> float:
    """Largest less least utilization among workers of one model; of several models the greatest such gap."""
    by_model: dict[str, list[float]] = {}
    for device in state.devices.values():
        by_model.setdefault(device.fingerprint, []).append(device.load.utilization)
    return max((max(values) - min(values) for values in by_model.values()), default=0.0)


def _choose(
    view: MeshView, state: LoopState, settings: BalancingSettings, gap: float, now: float
) -> tuple[Scored | None, list[Scored], str]:
    """The candidate that is taken, all that were scored, and the decision in words."""
    if len(view.under_way) >= settings.max_moves:
        return None, [], f"stays: {len(view.under_way)} of {settings.max_moves} moves are under way"
    devices = _rested(state)
    if state.is_balancing:
        scored = list(_score_all(devices, state, settings, now))
        taken = max((one for one in scored if one.pays), key=lambda one: one.net, default=None)
        reason = f"gap {gap:.2f}"
    elif state.num_calm_rounds >= CALM_ROUNDS:
        scored = list(_score_returns(devices, state, settings, now))
        taken = next((one for one in scored if one.pays), None)
        reason = f"calm for {state.num_calm_rounds} rounds"
    else:
        threshold = settings.delta_hi if gap >= settings.delta_lo else settings.delta_lo
        return None, [], f"stays: gap {gap:.2f} is below {threshold:g}"
    if taken is not None:
        return taken, scored, f"{_decision_in_words(taken, state)}: {reason}"
    if scored:
        return None, scored, f"stays: {reason}, but no candidate pays"
    return None, scored, f"stays: {reason}, and nothing can move now"


def _rested(state: LoopState) -> dict[str, Device]:
    """Devices that neither rest nor take part in a migration, by worker."""
    busy = {worker for move in state.under_way for worker in (move.instance, move.host)}
    return {
        worker: one
        for worker, one in state.devices.items()
        if worker not in busy and worker not in state.rests_until
    }


def _score_all(
    devices: dict[str, Device], state: LoopState, settings: BalancingSettings, now: float
) -> Iterator[Scored]:
    movable = _movable(state, now)
    for source, target, gap in _pairs(list(devices.values()), settings):
        for back in inbound(target, source, movable):
            yield score_migration(back, target, source)
        if target.can_host and (source.worker, target.worker) not in state.backs_off_until:
            for move in outbound(source, target, settings, gap=gap):
                yield score_migration(move, source, target)
    if settings.flips_roles and now >= state.flips_rest_until:
        for flip in role_flips(state.devices.values()):
            if flip.worker in devices:
                yield score_flip(flip, state.devices)


def _pairs(devices: list[Device], settings: BalancingSettings) -> Iterator[tuple[Device, Device, float]]:
    """Those that are far apart, of the most loaded with the least loaded of the same model, and how far."""
    ranked = sorted(devices, key=lambda one: one.load.utilization, reverse=True)
    for source in ranked[:NUM_ENDS]:
        alike = [one for one in ranked if one.fingerprint == source.fingerprint and one is not source]
        for target in alike[-NUM_ENDS:]:
            gap = source.load.utilization - target.load.utilization
            if gap >= settings.delta_lo:
                yield source, target, gap


def _score_returns(
    devices: dict[str, Device], state: LoopState, settings: BalancingSettings, now: float
) -> Iterator[Scored]:
    """What the loop moved, the oldest first."""
    movable = _movable(state, now)
    pairs = {
        one.move_id: (owner, devices[one.worker])
        for owner in devices.values()
        for one in owner.placement.placed
        if one.move_id in movable and one.worker in devices
    }
    for move_id in state.automatic:
        if move_id in pairs:
            owner, host = pairs[move_id]
            for move in inbound(owner, host, frozenset({move_id})):
                yield score_return(move, owner, host, state.devices, max_gap=settings.delta_lo)


def _movable(state: LoopState, now: float) -> frozenset[str]:
    """What the loop moved long enough ago."""
    return frozenset(move_id for move_id, since in state.automatic.items() if now - since >= COOLDOWN_SECONDS)


def _decision_in_words(taken: Scored, state: LoopState) -> str:
    move = taken.move
    if isinstance(move, Flip):
        return f"{state.devices[move.worker].name} flips to {move.to.value}"
    owner, host = state.devices[move.instance].name, state.devices[move.host].name
    source, target = (owner, host) if isinstance(move, Outbound) else (host, owner)
    return f"{change_in_words(move)} from {source} to {target}"


def _snapshot(device: Device) -> DeviceSnapshot:
    load = device.load
    return DeviceSnapshot(
        worker=device.worker,
        name=device.name,
        role=device.role.value,
        compute=load.compute,
        memory=load.memory,
        queue=load.queue,
        utilization=load.utilization,
    )


def _report(scored: Scored, *, is_taken: bool) -> CandidateReport:
    move = scored.move
    verdict = "taken" if is_taken else "another is better" if scored.pays else scored.verdict
    return CandidateReport(
        instance=move.worker if isinstance(move, Flip) else move.instance,
        host="" if isinstance(move, Flip) else move.host,
        what=change_in_words(move),
        benefit=scored.benefit,
        cost=scored.cost,
        move_seconds=scored.move_seconds,
        overhead_seconds=scored.overhead_seconds,
        verdict=verdict,
    )
