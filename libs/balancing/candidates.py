"""Which modules could go from one worker to another, and which could come back."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from libs.balancing.device_model import load_without_hosted
from libs.balancing.settings import BalancingSettings
from libs.balancing.view import Device, Flip, Inbound, Outbound
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import Placement
from libs.placement.role import Role

DELTA_LAYER = 0.4
"""From this gap on layers move also where memory is what weighs."""
GROWTH = 1.5
"""Of a pool by one migration where compute is as short as memory."""


def outbound(owner: Device, host: Device, settings: BalancingSettings, *, gap: float) -> Iterator[Outbound]:
    """What `owner` could hand to `host`: layers where the gap is great or compute is what weighs, heads where
    its own sequences fill its memory and compute is not what weighs: layers that lack heads can no longer
    leave. Where memory is short, layers also with their weights; and blocks, for models whose only KV head
    cannot be split off."""
    placement, is_short = owner.placement, owner.load.is_memory_short
    own = load_without_hosted(owner)
    num_blocks = _num_blocks_wanted(owner)
    if placement.remote_blocks():
        return
    if settings.moves_layers and (gap >= DELTA_LAYER or not own.is_memory_bound):
        for module in layer_runs(placement):
            yield Outbound(owner.worker, host.worker, module, num_blocks=num_blocks)
            if is_short:
                yield Outbound(owner.worker, host.worker, module, with_weights=True, num_blocks=num_blocks)
    spares_heads = own.is_memory_short and (own.is_memory_bound or not settings.moves_layers)
    if settings.moves_heads and spares_heads and not _has_modules_at(host, owner):
        for module in head_groups(placement, keeps_layers=settings.moves_layers):
            yield Outbound(owner.worker, host.worker, module, num_blocks=num_blocks)
        if placement.num_kv_heads == 1 and not placement.placed:
            yield Outbound(owner.worker, host.worker, remote_blocks(placement.num_layers))


def _has_modules_at(owner: Device, host: Device) -> bool:
    """They are to go back before any go the other way for memory."""
    return any(placed.worker == host.worker for placed in owner.placement.placed)


def _num_blocks_wanted(owner: Device) -> int:
    """For the owner afterwards; 0: as many as there can be. What it has no use for would be taken from the
    host for nothing, and keep further modules from it."""
    if owner.load.is_memory_bound:
        return 0
    return int(owner.num_blocks * GROWTH) if owner.load.is_memory_short else owner.num_blocks


def layer_runs(placement: Placement) -> list[Module]:
    """1, 2, 4, .. whole layers at either end of what is at the owner; one layer stays."""
    num_own = sum(len(run.layers) for run in placement.layer_runs() if not run.move_id)
    runs = list(_own_runs(placement, whole=True))
    found: dict[Module, None] = {}
    count = 1
    while runs and count < num_own:
        first, last = runs[0], runs[-1]
        if count <= first[1] - first[0]:
            found[whole_layers(first[0], first[0] + count)] = None
        if count <= last[1] - last[0]:
            found[whole_layers(last[1] - count, last[1])] = None
        count *= 2
    return list(found)


def head_groups(placement: Placement, *, keeps_layers: bool = False) -> list[Module]:
    """Some of the KV heads at the owner, one stays: in whole runs of layers, and in the later half of each.
    With `keeps_layers` only there where a run has all its heads: the other half can still leave as layers."""
    found: dict[Module, None] = {}
    for first, end in _own_runs(placement, whole=False):
        here = _heads_here(placement, first)
        for count in _head_counts(len(here)):
            middle, is_whole = (first + end) // 2, len(here) == placement.num_kv_heads
            for start in {middle} - {first} if keeps_layers and is_whole else (first, middle):
                found[heads_of(start, end, tuple(here[-count:]))] = None
    return list(found)


def inbound(owner: Device, host: Device, movable: frozenset[str]) -> Iterator[Inbound]:
    """What this host has of the owner and the loop may give back."""
    for one in owner.placement.placed:
        if one.worker == host.worker and one.move_id in movable:
            yield Inbound(owner.worker, host.worker, one.move_id, one.module)


def role_flips(devices: Iterable[Device]) -> Iterator[Flip]:
    """Workers that could take the other role: alone with their own instance, and not the last of theirs."""
    every = tuple(devices)
    hosts = {placed.worker for one in every for placed in one.placement.placed}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        here = [one for one in every if one.role is role]
        if len(here) < 2:
            continue
        for one in here:
            if not one.placement.placed and not one.hosted_bytes and one.worker not in hosts:
                yield Flip(one.worker, other)


def _own_runs(placement: Placement, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Consecutive layers at the owner that have the same KV heads there; with `whole` only those with all."""
    at_owner = [layer for run in placement.layer_runs() if not run.move_id for layer in run.layers]
    keys = [(layer - number, _heads_here(placement, layer)) for number, layer in enumerate(at_owner)]
    for (_, heads), group in groupby(zip(keys, at_owner, strict=True), key=lambda item: item[0]):
        layers = [layer for _, layer in group]
        if not whole or len(heads) == placement.num_kv_heads:
            yield layers[0], layers[-1] + 1


def _heads_here(placement: Placement, layer: int) -> tuple[int, ...]:
    away = {head for one in placement.heads_away(layer) for head in one.module.kv_heads}
    return tuple(head for head in range(placement.num_kv_heads) if head not in away)


def _head_counts(num_here: int) -> Iterator[int]:
    """1 to n-1; above eight only powers of two, since a round considers many pairs of devices."""
    return (count for count in range(1, num_here) if count <= 8 or count & (count - 1) == 0)
