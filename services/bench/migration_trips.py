"""What is measured of a module that moves away and comes home, all in seconds."""

from dataclasses import dataclass, field
from typing import Any

from libs.cost.migration import ModelShape, weight_memory_bytes
from libs.placement.module import Module, heads_of, whole_layers
from services.bench.migration_costs import HostingCost

MOST_STEPS_HEADS, MOST_STEPS_LAYERS = 3.0, 5.0
"""Median steps that the longest gap between two tokens may be while such a module moves."""


@dataclass(frozen=True)
class MoveKind:
    """A module, and how many median steps the longest gap between two tokens may be while it moves."""

    name: str
    module: Module
    asked: dict[str, Any]
    most_steps: float

    @property
    def with_weights(self) -> bool:
        """Whether they travel."""
        return self.asked.get("kind") == "migrate"


def kinds_of(num_layers: int, num_kv_heads: int) -> list[MoveKind]:
    """Each number of KV heads that can leave, a third of the layers both ways."""
    heads = [
        MoveKind(
            f"{count} of {num_kv_heads} KV heads",
            heads_of(0, num_layers, tuple(range(num_kv_heads - count, num_kv_heads))),
            {"kv_heads": list(range(num_kv_heads - count, num_kv_heads))},
            MOST_STEPS_HEADS,
        )
        for count in range(1, num_kv_heads)
    ]
    first = num_layers - num_layers // 3
    module = whole_layers(first, num_layers)
    layers = [
        MoveKind(
            f"{len(module.layers)} layers, {kind}",
            module,
            {"layers": [first, num_layers], "kind": kind},
            MOST_STEPS_LAYERS,
        )
        for kind in ("offload", "migrate")
    ]
    return heads + layers


@dataclass
class Watched:
    """One move, one way."""

    record: dict[str, Any]
    before_seconds: float
    """Median step, just before it."""
    during_seconds: float
    """Median step."""
    after_seconds: float
    """Median step."""
    client_gap_seconds: float
    worker_gap_seconds: float
    num_live_blocks: int
    """That the streams held when it began."""


@dataclass
class Trip:
    """Away and back."""

    kind: MoveKind
    away: Watched
    home: Watched
    formula_seconds: float
    """What a step should take longer while it is away."""

    @property
    def overhead_seconds(self) -> float:
        """What a step did take longer; contexts grow meanwhile, so home is measured on both sides."""
        return self.away.after_seconds - (self.away.before_seconds + self.home.after_seconds) / 2


@dataclass
class Measured:
    """One mesh."""

    dtype: str
    shape: ModelShape
    hosting: HostingCost
    num_blocks: int
    """Of each worker's pool, with nothing away."""
    num_least_blocks: int
    """That a host keeps for itself."""
    quiet_gap_seconds: float
    """The longest as clients see them, in as long a time without any move."""
    quiet_step_seconds: float
    trips: list[Trip] = field(default_factory=list[Trip])

    def expected_blocks(self, kind: MoveKind) -> int:
        """Of the home while the module is away: what its own memory holds of what stays, or what the host's
        holds of what left, whichever is less."""
        shape, num_slots = self.shape, len(kind.module.slots(self.shape.num_kv_heads))
        slot_bytes = shape.block_bytes // (shape.num_layers * shape.num_kv_heads)
        weights = weight_memory_bytes(shape, kind.module, with_weights=kind.with_weights)
        away_bytes, pool_bytes = num_slots * slot_bytes, self.num_blocks * shape.block_bytes
        at_home = (pool_bytes + weights) // (shape.block_bytes - away_bytes)
        room = pool_bytes - self.num_least_blocks * shape.block_bytes - weights
        return min(at_home, room // away_bytes)
