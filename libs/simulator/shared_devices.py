"""What each device of a simulated mesh does for whom, when modules are elsewhere and devices have shares.

A share lets a device be busy so many seconds a second. Work that waits for another device leaves it time to
catch up, so an instance is as fast as the slowest of its parts: each needs its fraction of a step's busy
seconds on its device, and has what others leave it there, half of the share at least where both want all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from libs.balancing.device_model import num_slots
from libs.placement.module import ModuleKind
from libs.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class Use:
    """Busy seconds per second on one device."""

    own: float
    hosted: float


def fractions(placement: Placement, attention_share: float) -> dict[str, float]:
    """By worker, its part of what a step of the instance computes."""
    parts = {placement.owner: 1.0}
    for one in placement.placed:
        if one.module.kind is ModuleKind.TOKENS:
            continue
        part = num_slots(placement, one.module) / (placement.num_layers * placement.num_kv_heads)
        if one.module.kind is ModuleKind.HEADS:
            part *= attention_share
        parts[one.worker] = parts.get(one.worker, 0.0) + part
        parts[placement.owner] -= part
    return parts


def device_use(busy: Mapping[str, float], parts: Mapping[str, Mapping[str, float]]) -> dict[str, Use]:
    """By worker. `busy` is what the instance of each worker takes of all devices together."""
    use = dict.fromkeys(busy, Use(0.0, 0.0))
    for home, instance_busy in busy.items():
        for worker, part in parts[home].items():
            before, taken = use[worker], instance_busy * part
            use[worker] = (
                Use(before.own + taken, before.hosted)
                if worker == home
                else Use(before.own, before.hosted + taken)
            )
    return use


def slowdown(
    home: str, parts: Mapping[str, float], instance_busy: float, use: Mapping[str, Use], device_share: float
) -> float:
    """Of the steps of one instance."""
    worst = 1.0
    for worker, part in parts.items():
        others = use[worker].own + use[worker].hosted - instance_busy * part
        available = max(device_share - others, device_share / 2)
        worst = max(worst, part / available)
    return worst
