"""Which modules could go from one worker to another, and which could come back."""

from collections.abc import Iterator
from itertools import groupby

from libs.balancing.device_load import DeviceLoad, is_memory_bound, is_memory_short, load_without_guests
from libs.balancing.mesh_view import BringHome, Device, Flip, MeshView, MoveAway, Role
from libs.balancing.settings import BalancingSettings
from libs.placement.module import Module, heads_of, lent_blocks, whole_layers
from libs.placement.placement import Placement

GROWTH = 1.5
"""Of a pool by one move where compute is as short as memory."""


def moves_away(
    home: Device, host: Device, load: DeviceLoad, settings: BalancingSettings, *, gap: float
) -> Iterator[MoveAway]:
    """What `home`, under this load, could hand to `host`: layers where the gap is great or compute is what
    weighs, heads where its own sequences fill its memory and compute is not what weighs: layers that lack
    heads can no longer leave. Where memory is short, layers also with their weights; and blocks, for models
    whose only KV head cannot be split off."""
    placement, is_short = home.placement, is_memory_short(load, settings)
    own = load_without_guests(home, load)
    is_bound = is_memory_bound(own, settings)
    num_blocks = _num_blocks_wanted(home, load, settings)
    if placement.lent():
        return
    if settings.moves_layers and (gap >= settings.delta_layer or not is_bound):
        for module in layer_runs(placement):
            yield MoveAway(home.worker, host.worker, module, num_blocks=num_blocks)
            if is_short and settings.moves_weights:
                yield MoveAway(home.worker, host.worker, module, with_weights=True, num_blocks=num_blocks)
    spares_heads = is_memory_short(own, settings) and (is_bound or not settings.moves_layers)
    if settings.moves_heads and spares_heads and not _is_guest(host, home):
        for module in head_groups(placement, keeps_layers=settings.moves_layers):
            yield MoveAway(home.worker, host.worker, module, num_blocks=num_blocks)
        if placement.num_kv_heads == 1 and not placement.placed:
            yield MoveAway(home.worker, host.worker, lent_blocks(placement.num_layers))


def _is_guest(one: Device, host: Device) -> bool:
    """Whether modules of one are at that host: they are to go home before any go the other way for memory."""
    return any(placed.worker == host.worker for placed in one.placement.placed)


def _num_blocks_wanted(home: Device, load: DeviceLoad, settings: BalancingSettings) -> int:
    """For the home afterwards; 0: as many as there can be. What it has no use for would be taken from the
    host for nothing, and keep further modules from it."""
    if is_memory_bound(load, settings):
        return 0
    return int(home.num_blocks * GROWTH) if is_memory_short(load, settings) else home.num_blocks


def layer_runs(placement: Placement) -> list[Module]:
    """1, 2, 4, .. whole layers at either end of what is at home; one layer stays."""
    num_home = sum(len(run.layers) for run in placement.layer_runs() if not run.move_id)
    runs = list(_home_runs(placement, whole=True))
    found: dict[Module, None] = {}
    count = 1
    while runs and count < num_home:
        first, last = runs[0], runs[-1]
        if count <= first[1] - first[0]:
            found[whole_layers(first[0], first[0] + count)] = None
        if count <= last[1] - last[0]:
            found[whole_layers(last[1] - count, last[1])] = None
        count *= 2
    return list(found)


def head_groups(placement: Placement, *, keeps_layers: bool = False) -> list[Module]:
    """Some of the KV heads at home, one stays: in whole runs of layers, and in the later half of each. With
    `keeps_layers` only there where a run has all its heads: the other half can still leave as layers."""
    found: dict[Module, None] = {}
    for first, end in _home_runs(placement, whole=False):
        here = _heads_here(placement, first)
        for count in _head_counts(len(here)):
            middle, is_whole = (first + end) // 2, len(here) == placement.num_kv_heads
            for start in {middle} - {first} if keeps_layers and is_whole else (first, middle):
                found[heads_of(start, end, tuple(here[-count:]))] = None
    return list(found)


def ways_home(home: Device, host: Device, movable: frozenset[str]) -> Iterator[BringHome]:
    """What this host has of the home and the loop may give back."""
    for one in home.placement.placed:
        if one.worker == host.worker and one.move_id in movable:
            yield BringHome(home.worker, host.worker, one.move_id, one.module)


def role_flips(view: MeshView) -> Iterator[Flip]:
    """Workers that could take the other role: alone with their own instance, and not the last of theirs."""
    hosts = {one.worker for device in view.devices for one in device.placement.placed}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        here = [device for device in view.devices if device.role is role]
        if len(here) < 2:
            continue
        for device in here:
            if not device.placement.placed and not device.hosted_bytes and device.worker not in hosts:
                yield Flip(device.worker, other)


def _home_runs(placement: Placement, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Consecutive layers at home that have the same KV heads there; with `whole` only those with all."""
    at_home = [layer for run in placement.layer_runs() if not run.move_id for layer in run.layers]
    keys = [(layer - number, _heads_here(placement, layer)) for number, layer in enumerate(at_home)]
    for (_, heads), group in groupby(zip(keys, at_home, strict=True), key=lambda item: item[0]):
        layers = [layer for _, layer in group]
        if not whole or len(heads) == placement.num_kv_heads:
            yield layers[0], layers[-1] + 1


def _heads_here(placement: Placement, layer: int) -> tuple[int, ...]:
    away = {head for one in placement.heads_away(layer) for head in one.module.kv_heads}
    return tuple(head for head in range(placement.num_kv_heads) if head not in away)


def _head_counts(num_here: int) -> Iterator[int]:
    """1 to n-1; above eight only powers of two, since a round considers many pairs of devices."""
    return (count for count in range(1, num_here) if count <= 8 or count & (count - 1) == 0)
