"""How much of a held prefix to fetch, and how much to recompute. Pure.

A hit that costs more to fetch than to recompute is a miss. With k blocks fetched, the first step of the
prompt overlaps with the fetch layer by layer, later steps follow; while the prompt queues, fetching is free.
Between the points where this time changes its form it is concave in k, so that its minimum lies at one of
those points; they are few, and all of them are looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import combinations, pairwise

from libs.cost.fetch import FetchCost, streaming_seconds
from libs.cost.prefill import MAX_STEP_TOKENS, PrefillCost, prefill_seconds


class FetchReason(Enum):
    """Why a plan fetches what it fetches."""

    NOTHING_HELD = "nothing_held"
    """No store has a block beyond those here that could be used."""
    FETCH_ALL = "fetch_all"
    FETCH_PART = "fetch_part"
    """Fetching the rest would cost more than to recompute it."""
    RECOMPUTE = "recompute"
    """Fetching any of it would cost more than to recompute it."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """How many blocks to fetch behind those that are here, and what comes of it."""

    num_blocks: int
    seconds: float
    """From now to the prompt's last token computed."""
    reason: FetchReason


@dataclass(frozen=True, slots=True)
class PromptToPlan:
    """One prompt, where its blocks are, and what fetching and computing cost."""

    num_tokens: int
    num_here_blocks: int
    num_held_blocks: int
    block_size: int
    block_bytes: int
    num_layers: int
    prefill: PrefillCost
    fetch: FetchCost
    num_sharing: int
    num_memory_blocks: int
    """Of the held blocks, the first so many are in the store's memory, the others on its disk."""
    max_step_tokens: int
    queued_seconds: float

    @property
    def max_blocks(self) -> int:
        """Blocks that can be fetched: at least the prompt's last token is computed, for its logits."""
        usable = min(self.num_held_blocks, (self.num_tokens - 1) // self.block_size)
        return max(0, usable - self.num_here_blocks)

    def num_new_tokens(self, num_blocks: int) -> int:
        """Tokens left to compute when so many blocks are fetched."""
        return self.num_tokens - (self.num_here_blocks + num_blocks) * self.block_size

    def streaming_seconds(self, num_blocks: int) -> float:
        """Seconds these blocks travel, without latency."""
        num_disk = max(
            0, self.num_here_blocks + num_blocks - max(self.num_memory_blocks, self.num_here_blocks)
        )
        return self.num_sharing * streaming_seconds(
            self.fetch, num_blocks * self.block_bytes, num_disk * self.block_bytes
        )

    def step_seconds(self, num_blocks: int) -> tuple[float, float]:
        """Seconds of the first step, and of all that come after it."""
        num_new = self.num_new_tokens(num_blocks)
        num_first = min(num_new, self.max_step_tokens)
        context = self.num_tokens - num_new
        first = prefill_seconds(self.prefill, num_first, context, max_step_tokens=self.max_step_tokens)
        rest = prefill_seconds(
            self.prefill, num_new - num_first, context + num_first, max_step_tokens=self.max_step_tokens
        )
        return first, rest

    def first_step_ends(self, num_blocks: int) -> tuple[float, ...]:
        """The first step ends with the last of these: the computing behind the queue, the computing behind
        the first layer's arrival, the last layer behind its own arrival."""
        first, _ = self.step_seconds(num_blocks)
        if num_blocks == 0:
            return (self.queued_seconds + first,)
        fetching, latency = self.streaming_seconds(num_blocks), self.fetch.latency_seconds
        return (
            self.queued_seconds + first,
            latency + fetching / self.num_layers + first,
            latency + fetching + first / self.num_layers,
        )

    def seconds(self, num_blocks: int) -> float:
        """What fetching exactly so many blocks leads to."""
        return max(self.first_step_ends(num_blocks)) + self.step_seconds(num_blocks)[1]


def plan_fetch(
    *,
    num_tokens: int,
    num_here_blocks: int,
    num_held_blocks: int,
    block_size: int,
    block_bytes: int,
    num_layers: int,
    prefill: PrefillCost,
    fetch: FetchCost,
    num_sharing: int = 1,
    num_memory_blocks: int | None = None,
    max_step_tokens: int = MAX_STEP_TOKENS,
    queued_seconds: float = 0.0,
) -> FetchPlan:
    """The best of fetching none, a part or all of a held prefix, by the overlapped time.

    Counts of blocks are from the prompt's start: `num_here_blocks` need no fetch, `num_held_blocks` are here
    or at a store, `num_memory_blocks` here or in a store's memory (None: all that are held). `block_bytes`
    is one block in all layers. `num_sharing`: fetches under way, this one included. `queued_seconds`: until
    the prompt's first step can begin; the fetch begins now. Of equals, the least fetched wins. Looks at
    O(num_tokens / max_step_tokens) points. Raises ValueError for counts that make no prompt.
    """
    _check(num_tokens, num_here_blocks, num_held_blocks, block_size, block_bytes, num_layers, num_sharing)
    prompt = PromptToPlan(
        num_tokens,
        min(num_here_blocks, (num_tokens - 1) // block_size),
        num_held_blocks,
        block_size,
        block_bytes,
        num_layers,
        prefill,
        fetch,
        num_sharing,
        num_held_blocks if num_memory_blocks is None else min(num_memory_blocks, num_held_blocks),
        max_step_tokens,
        max(0.0, queued_seconds),
    )
    max_blocks = prompt.max_blocks
    if max_blocks == 0:
        return FetchPlan(0, prompt.seconds(0), FetchReason.NOTHING_HELD)
    seconds, num_blocks = min((prompt.seconds(k), k) for k in _candidates(prompt))
    return FetchPlan(num_blocks, seconds, _reason(num_blocks, max_blocks))


def _reason(num_blocks: int, max_blocks: int) -> FetchReason:
    if num_blocks == 0:
        return FetchReason.RECOMPUTE
    return FetchReason.FETCH_ALL if num_blocks == max_blocks else FetchReason.FETCH_PART


def _candidates(prompt: PromptToPlan) -> set[int]:
    """Both ends of every piece within which the time is concave."""
    max_blocks = prompt.max_blocks
    ends = {1, max_blocks, *_steps_change(prompt), *_disk_matters(prompt)}
    edges = sorted(k for k in ends if 1 <= k <= max_blocks)
    found = {0, *edges}
    for low, high in pairwise(edges):
        found.update(_crossing(prompt, low, high))
    return found


def _steps_change(prompt: PromptToPlan) -> Iterator[int]:
    """Around every number of blocks that saves a step."""
    num_steps = -(-prompt.num_new_tokens(0) // prompt.max_step_tokens)
    for steps in range(1, num_steps):
        saved = prompt.num_new_tokens(0) - steps * prompt.max_step_tokens
        last_with_more = (saved - 1) // prompt.block_size
        yield from (last_with_more, last_with_more + 1)


def _disk_matters(prompt: PromptToPlan) -> Iterator[int]:
    """Around where blocks from disk begin, and where the disk begins to be what the fetch waits for."""
    rate, disk_rate = prompt.fetch.bytes_per_second, prompt.fetch.disk_bytes_per_second
    num_memory = max(0, prompt.num_memory_blocks - prompt.num_here_blocks)
    if num_memory >= prompt.max_blocks or not 0 < disk_rate < rate:
        return
    slower_from = int(min(num_memory * rate / (rate - disk_rate), prompt.max_blocks))
    yield from (num_memory, num_memory + 1, slower_from, slower_from + 1)


def _crossing(prompt: PromptToPlan, low: int, high: int) -> Iterator[int]:
    """The neighbours between `low` and `high` where another of the three ends becomes the last. Within a
    piece each pair of them changes order once at most: the fetch grows linearly, while the first step grows
    linearly as long as it is full, and only shrinks from then on."""
    at_low, at_high = prompt.first_step_ends(low), prompt.first_step_ends(high)
    for one, other in combinations(range(3), 2):
        starts_later = at_low[one] > at_low[other]
        if (at_high[one] > at_high[other]) == starts_later:
            continue
        left, right = low, high
        while right - left > 1:
            middle = (left + right) // 2
            ends = prompt.first_step_ends(middle)
            left, right = (middle, right) if (ends[one] > ends[other]) == starts_later else (left, middle)
        yield from (left, right)


def _check(
    num_tokens: int,
    num_here: int,
    num_held: int,
    block_size: int,
    block_bytes: int,
    num_layers: int,
    sharing: int,
) -> None:
    if num_tokens < 1 or min(num_here, num_held, block_bytes) < 0 or min(block_size, num_layers, sharing) < 1:
        raise ValueError(
            f"not a prompt to plan for: {num_tokens} tokens, {num_here} blocks here, {num_held} held, "
            f"{block_size} tokens and {block_bytes} bytes a block, {num_layers} layers, {sharing} sharing"
        )
