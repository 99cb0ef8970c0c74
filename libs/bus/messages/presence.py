"""Who is there, in which state, under what load."""

from enum import Enum
from typing import ClassVar

import msgspec

from libs.bus.message import Message
from libs.cost.load import WorkerLoad


class ServiceKind(Enum):
    """The programs of the mesh; values are the folder names under services/."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL_WORKER = "prefill_worker"
    DECODE_WORKER = "decode_worker"
    KV_STORE = "kv_store"
    MIGRATION_COORDINATOR = "migration_coordinator"


class ServiceState(Enum):
    """A service's life as others see it. A gone service has no presence entry."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the mesh. `incarnation` is new at every start: a restarted peer is a new peer."""

    kind: ServiceKind
    name: str
    """Stable over restarts, for people: decode-0."""
    incarnation: str
    state: ServiceState
    detail: str = ""
    """What it is busy with while starting, or why it is not ready."""
    pid: int = 0
    host: str = ""
    http_address: str = ""
    """Where /live, /ready and /metrics of this process are."""
    link_address: str = ""
    model: str = ""
    model_fingerprint: str = ""
    """Equal fingerprints mean that KV of one is KV of the other (weights, dtype, block layout)."""
    max_model_len: int = 0
    runs_prompts: bool = False
    """A decode worker of role `both`: needs no prefill worker."""
    num_seats: int = 0
    """Requests that may be here at once, waiting or running; beyond it more are refused. 0: not told."""
    num_layers: int = 0
    block_bytes: int = 0
    """Of one KV block in all layers."""
    hosting_address: str = ""
    """Where Links of homes that move modules here are taken; empty: this process hosts nothing."""
    calls_address: str = ""
    """Where the Links are taken that bring calls of those modules."""
    num_kv_heads: int = 0
    hidden_size: int = 0
    head_dim: int = 0
    num_heads: int = 0
    element_bytes: int = 0
    """Of weights, activations and KV."""
    layer_weight_bytes: int = 0
    """Of one layer, as it travels."""
    layer_memory_bytes: int = 0
    """Of one layer, as it lies in this worker's memory: packed, on some machines beside a plain copy."""
    kv_memory_bytes: int = 0
    """All that this worker may use for KV and hosted modules."""
    device_share: float = 1.0
    """Busy seconds per second that it may have."""


class LoadReport(Message, frozen=True, kw_only=True, tag="load"):
    """Published by each worker a few times a second and when its load jumps; `sequence` rises."""

    subject: ClassVar[str] = "kvmesh.load"
    kind: ServiceKind
    incarnation: str
    sequence: int
    load: WorkerLoad
