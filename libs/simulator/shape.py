"""What a simulated cluster is made of."""

import msgspec

from libs.cost.fetch import FetchCost
from libs.cost.prefill import MAX_STEP_TOKENS, PrefillCost
from libs.kv.eviction import EvictionKind
from libs.kv.write_policy import WritePolicy


class DecodeCost(msgspec.Struct, frozen=True):
    """A decode step takes `step + sequence*B + token*context` seconds: weights are read once, the KV of every
    sequence of the batch is."""

    step_seconds: float
    sequence_seconds: float
    token_seconds: float
    """For each token of context in the batch."""


class PrefillShape(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill instance."""

    cost: PrefillCost
    num_blocks: int
    """Its KV pool, which caches the blocks of prompts that are through."""
    max_step_tokens: int = MAX_STEP_TOKENS


class DecodeShape(msgspec.Struct, frozen=True, kw_only=True):
    """One decode instance."""

    cost: DecodeCost
    num_blocks: int


class StoreShape(msgspec.Struct, frozen=True, kw_only=True):
    """One store."""

    num_memory_blocks: int
    fetch: FetchCost
    num_disk_blocks: int = 0
    """0: it has no disk."""
    eviction: EvictionKind = "lru"
    write_policy: WritePolicy = "write_through"
    ttl_seconds: float | None = None
    """Blocks that are unused for longer go; None: they stay until they are evicted."""
    group_ttl_seconds: dict[bytes, float] = msgspec.field(default_factory=dict[bytes, float])
    """The same for subtrees, by the name of their first block."""


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """All instances and stores; those of a kind are alike."""

    num_prefill: int
    num_decode: int
    num_stores: int
    prefill: PrefillShape
    decode: DecodeShape
    store: StoreShape
    block_size: int
    block_bytes: int
    """In all layers."""
    num_layers: int
    max_waiting_tokens: int = 32768
    """A prefill instance with more prompt tokens queued gets no further ones, as in the router."""

    @property
    def store_names(self) -> tuple[str, ...]:
        """As `up` names them."""
        return tuple(f"store-{number}" for number in range(self.num_stores))
