"""Placements and moves as clients read them: workers by name, modules also in words. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from libs.bus.messages.migration import MigrationRecord, PlacementUpdate
from libs.bus.messages.presence import Presence
from libs.cost.load import WorkerLoad
from libs.mesh.cluster_state import ClusterState, Heard
from libs.mesh.workers import names_of
from libs.placement.migration import is_over
from libs.placement.module import ModuleKind, module_in_words
from libs.placement.placement import HostedModuleStatus, PlacedModule, Placement

Names = Mapping[str, str]
"""Workers' names by incarnation."""


def placement_document(cluster: ClusterState, now: float) -> list[dict[str, Any]]:
    """Every instance whose worker is here and has told its placement."""
    services = cluster.roster.all()
    names = names_of(services)
    return [
        _instance(presence, heard, cluster, names, now)
        for presence in sorted(services, key=lambda p: (p.kind.value, p.name))
        if (heard := cluster.placement(presence.incarnation)) is not None
    ]


def move_document(move: MigrationRecord, names: Names) -> dict[str, Any]:
    """A move as it was recorded, with what it moves in words."""
    told: dict[str, Any] = {"id": move.move_id, **msgspec.to_builtins(move)}
    del told["move_id"]
    told["instance_name"] = move.instance_name or names.get(move.instance, "")
    told["host_name"] = move.host_name or names.get(move.host, "")
    told["what"] = module_in_words(move.module)
    told["kind"] = _move_kind(move)
    told["is_over"] = is_over(move.phase)
    return told


def _move_kind(move: MigrationRecord) -> str:
    if move.is_return:
        return "return"
    if move.module.kind is ModuleKind.LAYERS:
        return "migrate" if move.with_weights else "offload"
    return str(move.module.kind.value)


def _instance(
    presence: Presence, heard: Heard[PlacementUpdate], cluster: ClusterState, names: Names, now: float
) -> dict[str, Any]:
    told = heard.message
    placement = told.placement
    return {
        "name": presence.name,
        "incarnation": presence.incarnation,
        "kind": presence.kind.value,
        "state": presence.state.value,
        "model": presence.model,
        "epoch": placement.epoch,
        "num_layers": placement.num_layers,
        "num_kv_heads": placement.num_kv_heads,
        "layers": _layers(placement, names),
        "heads": [_placed(one, names) for one in placement.placed if one.module.kind is ModuleKind.HEADS],
        "lent": [_placed(one, names) for one in placement.remote_blocks()],
        "hosted": [_hosted(one, names) for one in told.hosted],
        "capacity": _capacity(presence, told, cluster),
        "age_seconds": round(now - heard.at, 3),
    }


def _capacity(presence: Presence, told: PlacementUpdate, cluster: ClusterState) -> dict[str, int]:
    """Blocks are those of the placement that is told with them: load reports come by themselves, and may be
    from before or after it."""
    heard = cluster.loads.get(presence.incarnation)
    load = heard.message.load if heard is not None else WorkerLoad()
    num_blocks = told.num_blocks or load.num_blocks
    return {
        "num_blocks": num_blocks,
        "num_used_blocks": min(load.num_used_blocks, num_blocks),
        "num_tokens": num_blocks * load.block_size,
        "kv_memory_bytes": presence.kv_memory_bytes,
        "num_own_bytes": _own_bytes(presence, told.placement, num_blocks),
        "num_hosted_bytes": sum(one.num_bytes for one in told.hosted),
    }


def _own_bytes(presence: Presence, placement: Placement, num_blocks: int) -> int:
    """Of its own blocks as far as they lie here: not what hosts hold of them, nor blocks that they lend."""
    num_slots = placement.num_layers * placement.num_kv_heads
    if not num_slots:
        return 0
    num_here = max(0, num_blocks - sum(one.num_blocks for one in placement.remote_blocks()))
    return num_here * presence.block_bytes * len(placement.resident_slots()) // num_slots


def _layers(placement: Placement, names: Names) -> list[dict[str, Any]]:
    """Runs of layers with who runs them; those that are away with the move that brought them there."""
    told: list[dict[str, Any]] = []
    for run in placement.layer_runs():
        entry: dict[str, Any] = {"first": run.first, "end": run.end, **_worker(run.worker, names)}
        if (placed := placement.get(run.move_id)) is not None:
            entry |= {"move_id": run.move_id, "has_weights_at_home": placed.has_weights_at_owner}
        told.append(entry)
    return told


def _placed(placed: PlacedModule, names: Names) -> dict[str, Any]:
    module = placed.module
    return {
        "move_id": placed.move_id,
        "what": module_in_words(module),
        "first": module.first_layer,
        "end": module.end_layer,
        "kv_heads": list(module.kv_heads),
        "num_blocks": placed.num_blocks,
        **_worker(placed.worker, names),
    }


def _hosted(hosted: HostedModuleStatus, names: Names) -> dict[str, Any]:
    return {
        "move_id": hosted.move_id,
        "instance": names.get(hosted.owner, hosted.owner),
        "instance_incarnation": hosted.owner,
        "what": module_in_words(hosted.module),
        "num_blocks": hosted.num_blocks,
        "num_bytes": hosted.num_bytes,
    }


def _worker(incarnation: str, names: Names) -> dict[str, str]:
    return {"worker": names.get(incarnation, incarnation), "incarnation": incarnation}
