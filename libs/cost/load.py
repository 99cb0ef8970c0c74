"""What a worker or a store holds and has to do, as it reports it a few times a second."""

import msgspec

from libs.cost.fetch import FetchCost
from libs.cost.prefill import PrefillCost


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
