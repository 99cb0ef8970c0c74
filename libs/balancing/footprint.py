"""Bytes: what a module takes at its host, and how many blocks an instance has when some of it is away."""

from libs.balancing.mesh_view import Device
from libs.cost.migration import weight_memory_bytes
from libs.placement.module import Module, ModuleKind
from libs.placement.placement import Placement


def num_slots(placement: Placement, module: Module) -> int:
    """`(layer, KV head)` pairs of a module; 0 for lent blocks, which are no part of a block."""
    if module.kind is ModuleKind.TOKENS:
        return 0
    num_heads = len(module.kv_heads) if module.kind is ModuleKind.HEADS else placement.num_kv_heads
    return len(module.layers) * num_heads


def resident_share(placement: Placement) -> float:
    """The part of a block that lies at home."""
    num_all = placement.num_layers * placement.num_kv_heads
    return 1.0 - sum(num_slots(placement, one.module) for one in placement.placed) / num_all


def module_block_bytes(device: Device, module: Module) -> float:
    """What one block of the home takes at the host of this module."""
    if module.kind is ModuleKind.TOKENS:
        return float(device.shape.block_bytes)
    placement = device.placement
    return (
        device.shape.block_bytes
        * num_slots(placement, module)
        / (placement.num_layers * placement.num_kv_heads)
    )


def usable_bytes(device: Device) -> float:
    """Of its memory for its own blocks; weights that went away have left theirs."""
    freed = sum(
        weight_memory_bytes(device.shape, one.module, with_weights=not one.has_weights_at_home)
        for one in device.placement.placed
    )
    known = device.memory_bytes or device.hosted_bytes + _pool_bytes(device)
    return max(0.0, known + freed - device.hosted_bytes)


def capacity(device: Device, placement: Placement, own_bytes: float) -> int:
    """Blocks of the instance with this placement, in so many bytes at home: never more than each host keeps
    for it."""
    per_block = device.shape.block_bytes * resident_share(placement)
    at_home = int(own_bytes / per_block) if per_block > 0 else device.num_blocks
    kept = [
        one.num_blocks
        for one in placement.placed
        if one.num_blocks and one.module.kind is not ModuleKind.TOKENS
    ]
    lent = sum(one.num_blocks for one in placement.lent())
    return min([at_home, *kept]) + lent


def num_blocks_without_guests(device: Device) -> int:
    """Of its pool if it had back what modules of others take."""
    return capacity(device, device.placement, usable_bytes(device) + device.hosted_bytes)


def room_bytes(host: Device) -> float:
    """What it could give to one more module: not what its own blocks in use take, nor its least pool."""
    num_kept = max(host.num_used_blocks, host.num_least_blocks)
    return max(0.0, usable_bytes(host) - num_kept * host.shape.block_bytes * resident_share(host.placement))


def fullness(num_used_blocks: float, num_blocks: int) -> float:
    """How full a pool is. What modules of others take counts by the blocks that it no longer has: memory that
    nobody asks for is no load."""
    return min(1.0, num_used_blocks / num_blocks) if num_blocks > 0 else 1.0


def _pool_bytes(device: Device) -> float:
    return device.num_blocks * device.shape.block_bytes * resident_share(device.placement)
