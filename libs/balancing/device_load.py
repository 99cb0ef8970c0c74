"""How loaded a device is: compute, memory and queue, smoothed, and the one number that is balanced."""

import math
from dataclasses import dataclass, replace

from libs.balancing.footprint import fullness, num_blocks_without_guests
from libs.balancing.mesh_view import Device
from libs.balancing.settings import BalancingSettings


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """Shares: of the busy seconds that the device may have, of the blocks that it has for its own instance,
    and queued work in units of `queue_seconds`."""

    compute: float
    memory: float
    queue: float


@dataclass(frozen=True, slots=True)
class Smoothed:
    """Exponentially weighted means, and the time they are of. What is compared is smoothed alike: against a
    load from before, a lull of a moment looks like time or memory to spare."""

    load: DeviceLoad
    occupancy: float
    """Seconds per second that steps of the own instance take, waiting for others included."""
    at_seconds: float


def load_of(device: Device, settings: BalancingSettings) -> DeviceLoad:
    """As reported now."""
    return DeviceLoad(
        compute=device.busy_share / device.device_share if device.device_share > 0 else 1.0,
        memory=fullness(device.num_used_blocks, device.num_blocks),
        queue=device.queued_seconds / settings.queue_seconds,
    )


def _occupancy_of(device: Device) -> float:
    """As reported now."""
    return device.busy_share - device.hosted_busy_share + device.away_share


def smooth(before: Smoothed | None, device: Device, now: float, settings: BalancingSettings) -> Smoothed:
    """What is older than `smoothing_seconds` counts a third, whatever the time between two rounds."""
    load, occupancy = load_of(device, settings), _occupancy_of(device)
    if before is None:
        return Smoothed(load, occupancy, now)
    keep = math.exp(-max(0.0, now - before.at_seconds) / settings.smoothing_seconds)
    old = before.load

    def mix(earlier: float, later: float) -> float:
        return keep * earlier + (1 - keep) * later

    mixed = DeviceLoad(
        mix(old.compute, load.compute), mix(old.memory, load.memory), mix(old.queue, load.queue)
    )
    return Smoothed(mixed, mix(before.occupancy, occupancy), now)


def utilization(load: DeviceLoad, settings: BalancingSettings) -> float:
    """The weighted sum that the loop balances."""
    return (
        settings.compute_weight * load.compute
        + settings.memory_weight * load.memory
        + settings.queue_weight * min(load.queue, settings.max_queue)
    )


def load_without_guests(device: Device, load: DeviceLoad) -> DeviceLoad:
    """How full its pool would be with the memory that modules of others have: what was given away can come
    back, so that it makes no worker one that is short of memory itself."""
    if not device.hosted_bytes:
        return load
    num_blocks = max(1, device.num_blocks, num_blocks_without_guests(device))
    return replace(load, memory=load.memory * device.num_blocks / num_blocks)


def is_memory_short(load: DeviceLoad, settings: BalancingSettings) -> bool:
    """Whether its pool is so full that more blocks would be of use, whatever it computes besides."""
    return load.memory >= settings.memory_pressure


def is_memory_bound(load: DeviceLoad, settings: BalancingSettings) -> bool:
    """Whether its memory is short, and weighs more than what it computes and what waits for that."""
    working = settings.compute_weight * load.compute + settings.queue_weight * min(
        load.queue, settings.max_queue
    )
    return is_memory_short(load, settings) and settings.memory_weight * load.memory > working
