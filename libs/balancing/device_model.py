"""A model of a device: its bytes and blocks, its load over time, and what a migration would make of it."""

import math
from dataclasses import dataclass, replace

import msgspec

from libs.balancing.view import Device, Inbound, Load, Outbound, fullness
from libs.cost.migration import (
    LinkCost,
    kv_bytes,
    move_seconds,
    step_overhead_seconds,
    weight_bytes,
    weight_memory_bytes,
)
from libs.placement.module import Module, ModuleKind
from libs.placement.placement import PlacedModule, Placement
from libs.placement.role import Role

SMOOTHING_SECONDS = 1.5
"""Loads are averaged over about this time."""
LINK = LinkCost(bytes_per_second=1e9, latency_seconds=2e-4)
"""Between two workers, where nobody has measured it: a loopback, or a 10 Gbit/s link."""
ATTENTION_SHARE = 0.25
"""The part of a step's work that is attention."""
PREFILL_STEP_TOKENS = 512
"""Tokens of a step of prompts, as good as any guess: the steps are not reported."""
SYNC_SECONDS = 0.1
"""What the phases of a migration take besides the bytes."""


# Bytes and blocks


def num_slots(placement: Placement, module: Module) -> int:
    """`(layer, KV head)` pairs of a module; 0 for lent blocks, which are no part of a block."""
    if module.kind is ModuleKind.TOKENS:
        return 0
    return len(module.layers) * len(module.heads(placement.num_kv_heads))


def resident_share(placement: Placement) -> float:
    """The part of a block that lies at the owner."""
    num_all = placement.num_layers * placement.num_kv_heads
    return 1.0 - sum(num_slots(placement, one.module) for one in placement.placed) / num_all


def module_block_bytes(device: Device, module: Module) -> float:
    """What one block of the owner takes at the host of this module."""
    if module.kind is ModuleKind.TOKENS:
        return float(device.shape.block_bytes)
    placement = device.placement
    num_all = placement.num_layers * placement.num_kv_heads
    return device.shape.block_bytes * num_slots(placement, module) / num_all


def usable_bytes(device: Device) -> float:
    """Of its memory for its own blocks; weights that went away have left theirs."""
    freed = sum(
        weight_memory_bytes(device.shape, one.module, with_weights=not one.has_weights_at_owner)
        for one in device.placement.placed
    )
    pool_bytes = device.num_blocks * device.shape.block_bytes * resident_share(device.placement)
    known = device.memory_bytes or device.hosted_bytes + pool_bytes
    return max(0.0, known + freed - device.hosted_bytes)


def capacity(device: Device, placement: Placement, own_bytes: float) -> int:
    """Blocks of the instance with this placement, in so many bytes at the owner: never more than each host
    keeps for it."""
    per_block = device.shape.block_bytes * resident_share(placement)
    at_owner = int(own_bytes / per_block) if per_block > 0 else device.num_blocks
    kept = [
        one.num_blocks
        for one in placement.placed
        if one.num_blocks and one.module.kind is not ModuleKind.TOKENS
    ]
    lent = sum(one.num_blocks for one in placement.remote_blocks())
    return min([at_owner, *kept]) + lent


def room_bytes(host: Device) -> float:
    """What it could give to one more module: not what its own blocks in use take, nor its least pool."""
    num_kept = max(host.num_used_blocks, host.num_least_blocks)
    return max(0.0, usable_bytes(host) - num_kept * host.shape.block_bytes * resident_share(host.placement))


# Loads


def smooth(before: Device | None, device: Device, seconds: float) -> Device:
    """With the exponentially weighted mean of its load, `seconds` after `before`: what is older than
    `SMOOTHING_SECONDS` counts a third, whatever the time between two rounds. What is compared is smoothed
    alike: against a load from before, a lull of a moment looks like time or memory to spare."""
    if before is None:
        return device
    keep = math.exp(-max(0.0, seconds) / SMOOTHING_SECONDS)
    old, new = before.load, device.load

    def mix(earlier: float, later: float) -> float:
        return keep * earlier + (1 - keep) * later

    mean = Load(
        compute=mix(old.compute, new.compute),
        memory=mix(old.memory, new.memory),
        queue=mix(old.queue, new.queue),
        occupancy=mix(old.occupancy, new.occupancy),
    )
    return replace(device, load=mean)


def load_without_hosted(device: Device) -> Load:
    """How full its pool would be with the memory that modules of others have: what was given away can come
    back, so that it makes no worker one that is short of memory itself."""
    if not device.hosted_bytes:
        return device.load
    with_all = capacity(device, device.placement, usable_bytes(device) + device.hosted_bytes)
    num_blocks = max(1, device.num_blocks, with_all)
    return replace(device.load, memory=device.load.memory * device.num_blocks / num_blocks)


# Predictions


@dataclass(frozen=True, slots=True)
class Predicted:
    """Two devices after a migration."""

    owner: Load
    """What is above 1 of its occupancy is lost throughput."""
    host: Load
    move_seconds: float
    overhead_seconds: float
    """More for each step of the owner; negative where it gets shorter."""
    added_share: float
    """The part of the owner's occupancy that is overhead."""
    num_blocks: int
    """The owner's afterwards."""

    @property
    def peak(self) -> float:
        """The greater utilization of the two."""
        return max(self.owner.utilization, self.host.utilization)


def predict_outbound(move: Outbound, owner: Device, host: Device) -> Predicted:
    """Work is taken to take the same busy seconds on either device; load that waits goes with it."""
    share = _work_share(owner.placement, move.module)
    own = owner.load.compute * (1 - owner.hosted_part)
    moved_seconds = own * share * owner.device_share
    overhead, added = _overhead(owner, move.module)
    occupancy = owner.load.occupancy + added
    relief = _relief(share, own, owner.load.compute - occupancy)
    num_blocks, hosted_bytes = _room_for(move, owner, host)
    return Predicted(
        owner=Load(
            compute=owner.load.compute - own * relief,
            memory=fullness(owner.load.memory * owner.num_blocks, num_blocks),
            queue=owner.load.queue * (1 - relief),
            occupancy=occupancy,
        ),
        host=_host_with(host, moved_seconds, hosted_bytes),
        move_seconds=_move_seconds(owner, move.module, with_weights=move.with_weights),
        overhead_seconds=overhead,
        added_share=added,
        num_blocks=num_blocks,
    )


def predict_inbound(move: Inbound, owner: Device, host: Device) -> Predicted:
    """The way back. A module takes as much as the same part of its owner does, and no more than its host
    spends for all it hosts: of several owners there one may work more than the others."""
    placed = owner.placement.get(move.move_id)
    if placed is None:
        raise ValueError(f"no module that move {move.move_id} brought away is away from {owner.name}")
    with_weights = not placed.has_weights_at_owner
    come, go = (
        weight_memory_bytes(one.shape, placed.module, with_weights=with_weights) for one in (owner, host)
    )
    held_bytes = placed.num_blocks * module_block_bytes(owner, placed.module)
    after = owner.placement.without(move.move_id)
    share = _work_share(after, placed.module)
    own = owner.load.compute * (1 - owner.hosted_part) * owner.device_share
    hosted = host.load.compute * host.hosted_part * host.device_share
    moved_seconds = min(hosted, own * share / max(1e-9, 1 - share))
    overhead, added = _overhead(owner, placed.module)
    num_blocks = capacity(owner, after, usable_bytes(owner) - come)
    return Predicted(
        owner=Load(
            compute=owner.load.compute + moved_seconds / owner.device_share,
            memory=fullness(owner.load.memory * owner.num_blocks, num_blocks),
            queue=owner.load.queue,
            occupancy=owner.load.occupancy - added,
        ),
        host=_host_with(host, -moved_seconds, -held_bytes - go),
        move_seconds=_move_seconds(owner, placed.module, with_weights=with_weights),
        overhead_seconds=-overhead,
        added_share=-added,
        num_blocks=num_blocks,
    )


def _host_with(host: Device, more_seconds: float, more_bytes: float) -> Load:
    """The host's load when modules of others take so much more of its time and memory."""
    before = host.load
    own_bytes = max(0.0, usable_bytes(host) - more_bytes)
    num_blocks = capacity(host, host.placement, own_bytes)
    return replace(
        before,
        compute=max(0.0, before.compute + more_seconds / host.device_share),
        memory=fullness(before.memory * host.num_blocks, num_blocks),
    )


def _relief(share: float, own: float, spare: float) -> float:
    """The part of what an owner does for its instance that a migration really takes off it.

    Steps wait for what is away. A device with a share of its time left to wait in (`spare`) runs more steps
    meanwhile; one whose steps fill all its time runs no more of them than before, however little it computes
    in each.
    """
    return min(share, max(0.0, spare) / own) if own > 0 else share


def _work_share(placement: Placement, module: Module) -> float:
    """The part of what the owner computes for its instance that a module takes along."""
    num_own_layers = sum(len(run.layers) for run in placement.layer_runs() if not run.move_id)
    if module.kind is ModuleKind.LAYERS:
        return len(module.layers) / max(1, num_own_layers)
    if module.kind is ModuleKind.TOKENS:
        return ATTENTION_SHARE / 2
    num_own_slots = num_own_layers * placement.num_kv_heads
    return ATTENTION_SHARE * num_slots(placement, module) / max(1, num_own_slots)


def _room_for(move: Outbound, owner: Device, host: Device) -> tuple[int, float]:
    """The owner's blocks afterwards, and the bytes that the host gives."""
    per_block = module_block_bytes(owner, move.module)
    left, came = (
        weight_memory_bytes(one.shape, move.module, with_weights=move.with_weights) for one in (owner, host)
    )
    room = max(0.0, room_bytes(host) - came)
    num_granted = int(room / per_block)
    if move.num_blocks:
        num_granted = min(num_granted, move.num_blocks)
    if move.module.kind is ModuleKind.TOKENS:
        return owner.num_blocks + num_granted, num_granted * per_block
    placed = PlacedModule(move_id="", module=move.module, worker=host.worker, num_blocks=max(1, num_granted))
    after = msgspec.structs.replace(owner.placement, placed=(*owner.placement.placed, placed))
    num_blocks = capacity(owner, after, usable_bytes(owner) + left)
    return num_blocks, num_blocks * per_block + came


def _move_seconds(owner: Device, module: Module, *, with_weights: bool) -> float:
    num_weight_bytes = weight_bytes(owner.shape, module, with_weights=with_weights)
    num_kv_bytes = kv_bytes(owner.shape, module, owner.num_used_blocks)
    return move_seconds(LINK, num_weight_bytes, num_kv_bytes, sync_seconds=SYNC_SECONDS)


def _overhead(owner: Device, module: Module) -> tuple[float, float]:
    """What each step pays for a module that is away, and what all steps of a second pay together."""
    num_tokens = PREFILL_STEP_TOKENS if owner.role is Role.PREFILL else max(1, owner.num_running)
    seconds = step_overhead_seconds(LINK, owner.shape, module, num_tokens)
    return seconds, seconds * owner.tokens_per_second / num_tokens
