"""The mesh as the loop is to see it: the ready workers of whom all is known and fresh. Pure."""

from libs.balancing.view import Device, MeshView, UnderWay, reported_load
from libs.bus.messages.migration import PlacementUpdate
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.cost.migration import shape_of
from libs.mesh.cluster_state import ClusterState
from libs.mesh.workers import WORKERS
from libs.placement.role import Role

STALE_AFTER_SECONDS = 3.0
"""A worker whose load reports stay out for longer is not used."""


def view_of(cluster: ClusterState, now: float) -> MeshView:
    """What is known at `now`, in unix seconds."""
    devices: list[Device] = []
    for presence in cluster.roster.all():
        if presence.kind not in WORKERS or presence.state is not ServiceState.READY:
            continue
        load, told = cluster.loads.get(presence.incarnation), cluster.placement(presence.incarnation)
        if load is None or told is None or now - load.at >= STALE_AFTER_SECONDS:
            continue
        if (device := _device(presence, load.message.load, told.message)) is not None:
            devices.append(device)
    under_way = [UnderWay(one.move_id, one.instance, one.host) for one in cluster.migrations.under_way()]
    return MeshView(tuple(devices), tuple(under_way))


def _role_of(presence: Presence) -> Role:
    if presence.kind is ServiceKind.PREFILL_WORKER:
        return Role.PREFILL
    return Role.BOTH if presence.runs_prompts else Role.DECODE


def _device(presence: Presence, load: WorkerLoad, told: PlacementUpdate) -> Device | None:
    """None where the worker does not tell the shape of its model."""
    shape = shape_of(presence)
    if shape is None:
        return None
    num_blocks = told.num_blocks or load.num_blocks
    reported = reported_load(
        busy_share=load.busy_share,
        hosted_busy_share=load.hosted_busy_share,
        away_share=load.away_share,
        device_share=presence.device_share,
        queued_seconds=load.queued_seconds,
        num_used_blocks=load.num_used_blocks,
        num_blocks=num_blocks,
    )
    return Device(
        worker=presence.incarnation,
        name=presence.name,
        role=_role_of(presence),
        fingerprint=presence.model_fingerprint,
        can_host=bool(presence.hosting_address),
        shape=shape,
        placement=told.placement,
        load=reported,
        device_share=presence.device_share,
        hosted_part=min(1.0, load.hosted_busy_share / load.busy_share) if load.busy_share > 0 else 0.0,
        tokens_per_second=load.tokens_per_second,
        num_running=load.num_running,
        memory_bytes=presence.kv_memory_bytes,
        hosted_bytes=load.num_hosted_bytes,
        num_blocks=num_blocks,
        num_used_blocks=load.num_used_blocks,
        num_least_blocks=-(-presence.max_model_len // shape.block_size),
    )
