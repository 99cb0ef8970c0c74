"""What a move would make of its two devices, how long it takes, and what each step pays for it afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from libs.balancing.device_load import DeviceLoad, Smoothed, utilization
from libs.balancing.footprint import (
    capacity,
    fullness,
    module_block_bytes,
    num_slots,
    room_bytes,
    usable_bytes,
)
from libs.balancing.mesh_view import BringHome, Device, MoveAway, Role
from libs.balancing.settings import BalancingSettings
from libs.cost.migration import (
    LinkCost,
    kv_bytes,
    move_seconds,
    step_overhead_seconds,
    weight_bytes,
    weight_memory_bytes,
)
from libs.placement.module import Module, ModuleKind
from libs.placement.placement import Placed, Placement

PREFILL_STEP_TOKENS = 512
"""Tokens of a step of prompts, as good as any guess: the steps are not reported."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Two devices after a move."""

    home: DeviceLoad
    host: DeviceLoad
    move_seconds: float
    overhead_seconds: float
    """More for each step of the home; negative where it gets shorter."""
    occupancy: float
    """Seconds per second that the home's steps would take, waiting for others included; what is above 1 is
    lost throughput."""
    added_share: float
    """The part of them that is overhead."""
    num_blocks: int
    """The home's afterwards."""


def predict_away(
    move: MoveAway, home: Device, host: Device, loads: Mapping[str, Smoothed], settings: BalancingSettings
) -> Predicted:
    """Work is taken to take the same busy seconds on either device; load that waits goes with it."""
    before_home, before_host = loads[home.worker].load, loads[host.worker].load
    share = _work_share(home.placement, move.module, settings)
    own = before_home.compute * _own_part(home)
    moved_seconds = own * share * home.device_share

    num_weight_bytes = weight_bytes(home.shape, move.module, with_weights=move.with_weights)
    overhead = _overhead_seconds(home, move.module, settings)
    added = overhead * home.tokens_per_second / _step_tokens(home)
    occupancy = loads[home.worker].occupancy + added
    relief = _relief(share, own, before_home.compute - occupancy)
    num_blocks, hosted_bytes = _room_for(move, home, host)
    return Predicted(
        home=DeviceLoad(
            before_home.compute - own * relief,
            fullness(before_home.memory * home.num_blocks, num_blocks),
            before_home.queue * (1 - relief),
        ),
        host=DeviceLoad(
            before_host.compute + moved_seconds / host.device_share,
            _memory_with(host, before_host, hosted_bytes),
            before_host.queue,
        ),
        move_seconds=_move_seconds(home, move.module, num_weight_bytes, settings),
        overhead_seconds=overhead,
        occupancy=occupancy,
        added_share=added,
        num_blocks=num_blocks,
    )


def predict_home(
    move: BringHome, home: Device, host: Device, loads: Mapping[str, Smoothed], settings: BalancingSettings
) -> Predicted:
    """The way back. A module takes as much as the same part of the home does, and no more than its host
    spends for all it hosts: of several homes there one may work more than the others."""
    placed = home.placement.get(move.move_id)
    if placed is None:
        raise ValueError(f"no module that move {move.move_id} brought away is away from {home.name}")
    before_home, before_host = loads[home.worker].load, loads[host.worker].load
    hosted = before_host.compute * (1 - _own_part(host)) * host.device_share
    held_bytes = placed.num_blocks * module_block_bytes(home, placed.module)
    with_weights = not placed.has_weights_at_home
    come, go = (
        weight_memory_bytes(one.shape, placed.module, with_weights=with_weights) for one in (home, host)
    )
    num_weight_bytes = weight_bytes(home.shape, placed.module, with_weights=with_weights)
    after = home.placement.without(move.move_id)
    share = _work_share(after, placed.module, settings)
    own = before_home.compute * _own_part(home) * home.device_share
    moved_seconds = min(hosted, own * share / max(1e-9, 1 - share))

    overhead = _overhead_seconds(home, placed.module, settings)
    added = overhead * home.tokens_per_second / _step_tokens(home)
    num_blocks = capacity(home, after, usable_bytes(home) - come)
    return Predicted(
        home=DeviceLoad(
            before_home.compute + moved_seconds / home.device_share,
            fullness(before_home.memory * home.num_blocks, num_blocks),
            before_home.queue,
        ),
        host=DeviceLoad(
            max(0.0, before_host.compute - moved_seconds / host.device_share),
            _memory_with(host, before_host, -held_bytes - go),
            before_host.queue,
        ),
        move_seconds=_move_seconds(home, placed.module, num_weight_bytes, settings),
        overhead_seconds=-overhead,
        occupancy=loads[home.worker].occupancy - added,
        added_share=-added,
        num_blocks=num_blocks,
    )


def peak(predicted: Predicted, settings: BalancingSettings) -> float:
    """The greater utilization of the two."""
    return max(utilization(predicted.home, settings), utilization(predicted.host, settings))


def _own_part(device: Device) -> float:
    """Of its busy seconds, those for its own instance."""
    if device.busy_share <= 0:
        return 1.0
    return 1.0 - min(1.0, device.hosted_busy_share / device.busy_share)


def _relief(share: float, own: float, spare: float) -> float:
    """The part of what a home does for its instance that a move really takes off it.

    Steps wait for what is away. A device with a share of its time left to wait in (`spare`) runs more steps
    meanwhile; one whose steps fill all its time runs no more of them than before, however little it computes
    in each.
    """
    return min(share, max(0.0, spare) / own) if own > 0 else share


def _work_share(placement: Placement, module: Module, settings: BalancingSettings) -> float:
    """The part of what home computes for its instance that a module takes along."""
    num_home_layers = sum(len(run.layers) for run in placement.layer_runs() if not run.move_id)
    if module.kind is ModuleKind.LAYERS:
        return len(module.layers) / max(1, num_home_layers)
    if module.kind is ModuleKind.TOKENS:
        return settings.attention_share / 2
    num_home_slots = num_home_layers * placement.num_kv_heads
    return settings.attention_share * num_slots(placement, module) / max(1, num_home_slots)


def _room_for(move: MoveAway, home: Device, host: Device) -> tuple[int, float]:
    """The home's blocks afterwards, and the bytes that the host gives."""
    per_block = module_block_bytes(home, move.module)
    left, came = (
        weight_memory_bytes(one.shape, move.module, with_weights=move.with_weights) for one in (home, host)
    )
    room = max(0.0, room_bytes(host) - came)
    num_granted = int(room / per_block)
    if move.num_blocks:
        num_granted = min(num_granted, move.num_blocks)
    if move.module.kind is ModuleKind.TOKENS:
        return home.num_blocks + num_granted, num_granted * per_block
    placed = Placed(move_id="", module=move.module, worker=host.worker, num_blocks=max(1, num_granted))
    after = msgspec.structs.replace(home.placement, placed=(*home.placement.placed, placed))
    num_blocks = capacity(home, after, usable_bytes(home) + left)
    return num_blocks, num_blocks * per_block + came


def _memory_with(host: Device, before: DeviceLoad, more_bytes: float) -> float:
    """How full the host's own pool is when modules of others take so many bytes more."""
    own = max(0.0, usable_bytes(host) - more_bytes)
    return fullness(before.memory * host.num_blocks, capacity(host, host.placement, own))


def _link(settings: BalancingSettings) -> LinkCost:
    return LinkCost(settings.link_bytes_per_second, settings.link_latency_seconds)


def _move_seconds(home: Device, module: Module, num_weight_bytes: int, settings: BalancingSettings) -> float:
    num_kv_bytes = kv_bytes(home.shape, module, home.num_used_blocks)
    return move_seconds(_link(settings), num_weight_bytes, num_kv_bytes, sync_seconds=0.1)


def _overhead_seconds(home: Device, module: Module, settings: BalancingSettings) -> float:
    return step_overhead_seconds(_link(settings), home.shape, module, _step_tokens(home))


def _step_tokens(home: Device) -> float:
    return PREFILL_STEP_TOKENS if home.role is Role.PREFILL else max(1, home.num_running)
