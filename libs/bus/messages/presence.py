"""Who is there, in which state, under what load."""

from enum import Enum
from typing import ClassVar

import msgspec

from libs.bus.message import Message
from libs.cost.fetch import FetchCost
from libs.cost.prefill import PrefillCost


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


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a KV store."""

    tier: str
    """A value of `Tier`: dram or disk."""
    num_blocks: int
    num_bytes: int
    capacity_bytes: int
    num_hit_blocks: int
    """Blocks found here, not in a faster tier, since the store started."""
    num_asked_blocks: int
    """Blocks that the store was asked for since then."""
    is_paused: bool = False
    """It takes no writes for now."""


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker holds and has to do now."""

    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0
    """Sequences whose KV is still on its way."""
    num_waiting_tokens: int = 0
    """Prompt tokens queued or not yet computed."""
    num_blocks: int = 0
    num_used_blocks: int = 0
    block_size: int = 0
    tokens_per_second: float = 0.0
    busy_share: float = 0.0
    """Busy seconds of the device per second."""
    hosted_busy_share: float = 0.0
    """The part of `busy_share` that modules of other instances took."""
    num_hosted_bytes: int = 0
    """Memory that they take here."""
    away_share: float = 0.0
    """Seconds per second that steps waited for modules of this instance on other workers."""
    queued_seconds: float = 0.0
    """How long the prompts counted above will keep the worker busy, as far as it can tell."""
    prefill_cost: PrefillCost | None = None
    """What a prompt's tokens cost here, as measured; None: not known."""
    fetch_cost: FetchCost | None = None
    """What it costs to bring KV from the stores here, as measured; None: not known."""
    mean_output_tokens: float = 0.0
    """What the sequences that ended here took, on a running average; 0: not known."""
    tiers: tuple[TierLoad, ...] = ()
    """Of a KV store, the fastest first."""
    recent_request_ids: tuple[str, ...] = ()
    """Attempts taken in within the last seconds: what is named here is counted in the figures above."""
    ended_request_ids: tuple[str, ...] = ()
    """Attempts that came to an end here within the last seconds, and whose gateways were told: one that still
    waits for such an attempt has lost its last token frame."""


class LoadReport(Message, frozen=True, kw_only=True, tag="load"):
    """Published by each worker a few times a second and when its load jumps; `sequence` rises."""

    subject: ClassVar[str] = "kvmesh.load"
    kind: ServiceKind
    incarnation: str
    sequence: int
    load: WorkerLoad
