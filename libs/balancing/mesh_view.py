"""The cluster as one round of the loop sees it. Values only; whoever has a mesh, or simulates one, fills it.

Shares are busy seconds per second; bytes are of the memory for KV and hosted modules.
"""

from dataclasses import dataclass
from enum import Enum

from libs.cost.migration import ModelShape
from libs.placement.module import Module
from libs.placement.placement import Placement


class Role(Enum):
    """What the instance of a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One ready worker, with its last load report."""

    worker: str
    """Incarnation."""
    name: str
    role: Role
    fingerprint: str
    """Workers with the same one can run each other's modules."""
    can_host: bool
    shape: ModelShape
    placement: Placement
    """Of its own instance."""
    device_share: float
    busy_share: float
    hosted_busy_share: float
    """The part of `busy_share` that modules of others took."""
    away_share: float
    """Seconds per second that its steps waited for modules elsewhere."""
    queued_seconds: float
    tokens_per_second: float
    """Of prompts and answers, that its instance ran through the model."""
    num_running: int
    memory_bytes: int
    hosted_bytes: int
    """Of `memory_bytes`, by modules of others."""
    num_blocks: int
    num_used_blocks: int
    num_least_blocks: int
    """That its pool never goes below: one request of the greatest length."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A move that is ordered and not over."""

    move_id: str
    instance: str
    host: str


@dataclass(frozen=True, slots=True)
class MeshView:
    """All ready workers whose load and placement are known, and what moves."""

    devices: tuple[Device, ...]
    under_way: tuple[UnderWay, ...] = ()


@dataclass(frozen=True, slots=True)
class MoveAway:
    """A module of one instance goes to another worker."""

    instance: str
    host: str
    module: Module
    with_weights: bool = False
    num_blocks: int = 0
    """That the host is to hold for it; 0: as many as it can and the home has use for."""


@dataclass(frozen=True, slots=True)
class BringHome:
    """What an earlier move brought away comes home."""

    instance: str
    host: str
    move_id: str
    module: Module


@dataclass(frozen=True, slots=True)
class Flip:
    """A worker takes the other role."""

    worker: str
    to: Role


Decision = MoveAway | BringHome | Flip | None
"""None: nothing moves."""
