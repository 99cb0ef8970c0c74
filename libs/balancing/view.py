"""What goes into a round of the loop and what comes out of it. Values only; whoever has a mesh, or simulates
one, fills them.

Shares are busy seconds per second; bytes are of the memory for KV and hosted modules.
"""

from dataclasses import dataclass

import msgspec

from libs.cost.migration import ModelShape
from libs.placement.module import Module
from libs.placement.placement import Placement
from libs.placement.role import Role

COMPUTE_WEIGHT, MEMORY_WEIGHT, QUEUE_WEIGHT = 0.5, 0.4, 0.1
"""Of a device's busy share, of the taken share of its blocks, and of its queue, in its utilization."""
MAX_QUEUE = 2.0
"""A longer queue weighs no more than this."""
QUEUE_SECONDS = 1.0
"""Seconds of queued work that count as a queue of 1."""
MEMORY_PRESSURE = 0.8
"""Memory is short where more than this share of the blocks is taken."""


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of a device: as it reports them, smoothed, or predicted."""

    compute: float
    """Of the busy seconds that it may have."""
    memory: float
    """Of the blocks that it has for its own instance."""
    queue: float
    """Queued work in units of `QUEUE_SECONDS`."""
    occupancy: float
    """Seconds per second that steps of its own instance take, waiting for others included."""

    @property
    def working(self) -> float:
        """The part of the utilization that is not memory."""
        return COMPUTE_WEIGHT * self.compute + QUEUE_WEIGHT * min(self.queue, MAX_QUEUE)

    @property
    def utilization(self) -> float:
        """The weighted sum that the loop balances."""
        return self.working + MEMORY_WEIGHT * self.memory

    @property
    def is_memory_short(self) -> bool:
        """Whether its pool is so full that more blocks would be of use, whatever it computes besides."""
        return self.memory >= MEMORY_PRESSURE

    @property
    def is_memory_bound(self) -> bool:
        """Whether its memory is short, and weighs more than what it computes and what waits for that."""
        return self.is_memory_short and MEMORY_WEIGHT * self.memory > self.working


def reported_load(
    *,
    busy_share: float,
    hosted_busy_share: float,
    away_share: float,
    device_share: float,
    queued_seconds: float,
    num_used_blocks: int,
    num_blocks: int,
) -> Load:
    """The load by a worker's report; `away_share` are the seconds per second that its steps wait for modules
    elsewhere."""
    return Load(
        compute=busy_share / device_share if device_share > 0 else 1.0,
        memory=fullness(num_used_blocks, num_blocks),
        queue=queued_seconds / QUEUE_SECONDS,
        occupancy=busy_share - hosted_busy_share + away_share,
    )


def fullness(num_used_blocks: float, num_blocks: int) -> float:
    """How full a pool is. What modules of others take counts by the blocks that it no longer has: memory that
    nobody asks for is no load."""
    return min(1.0, num_used_blocks / num_blocks) if num_blocks > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One ready worker."""

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
    load: Load
    """As reported; in the loop's state smoothed."""
    device_share: float
    hosted_part: float
    """Of its busy seconds, the part that modules of others took."""
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
    """A migration that is ordered and not over."""

    move_id: str
    instance: str
    host: str


@dataclass(frozen=True, slots=True)
class MeshView:
    """All ready workers whose load and placement are known, and what migrates."""

    devices: tuple[Device, ...]
    under_way: tuple[UnderWay, ...] = ()


@dataclass(frozen=True, slots=True)
class Outbound:
    """A module of one instance goes to another worker."""

    instance: str
    host: str
    module: Module
    with_weights: bool = False
    num_blocks: int = 0
    """That the host is to hold for it; 0: as many as it can and the owner has use for."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """What an earlier migration brought to a host comes back to its owner."""

    instance: str
    host: str
    move_id: str
    module: Module


@dataclass(frozen=True, slots=True)
class Flip:
    """A worker takes the other role."""

    worker: str
    to: Role


Decision = Outbound | Inbound | Flip | None
"""None: nothing moves."""


class DeviceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in one round of the loop, smoothed; shares from 0 to 1 unless they say more."""

    worker: str
    name: str
    role: str
    compute: float
    memory: float
    queue: float
    utilization: float
    """The weighted sum that is balanced."""


class CandidateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One change that was considered in a round."""

    instance: str
    host: str
    what: str
    """For people: `layers 20-29`, `KV head 1 of layers 0-29`, `home: layers 20-29`, `flip to decode`."""
    benefit: float
    cost: float
    move_seconds: float
    overhead_seconds: float
    """Added to each step."""
    verdict: str
    """`taken`, or why not."""


class RoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """One round of the loop: what it saw, considered and did."""

    number: int
    unix_seconds: float
    devices: tuple[DeviceSnapshot, ...]
    gap: float
    """Largest less least utilization."""
    is_balancing: bool
    """Between the two thresholds it goes on doing what it did."""
    candidates: tuple[CandidateReport, ...] = ()
    decision: str
    """For people, with the reason."""
    move_id: str = ""
