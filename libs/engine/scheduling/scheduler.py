"""What the next step computes. Pure: sequences and limits in, a schedule out; nothing is changed.

Order is age (arrival), oldest first. A decode takes one token; prompts share what is left of the step's
tokens, in chunks. Out of blocks, the youngest sequence that holds some is preempted, but never for a younger
one: so the oldest always goes on, and each is the oldest one day. One that is loading is left out until its
KV is there. A sequence without blocks (once preempted)
comes back when all its tokens fit; until then none behind it comes back, and nothing new is reserved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler reads of a sequence."""

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        ...

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in the pool; less than `num_tokens`."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        ...

    @property
    def hand_over(self) -> bool:
        """Whether its KV is handed out and it ends with its first token."""
        ...

    @property
    def num_handed_blocks(self) -> int:
        """Blocks handed out already."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether KV of its first tokens is still on its way: it runs in steps of its own."""
        ...


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True)
class Limits:
    """`num_hand_over_blocks` is how many blocks, all layers of each, may still be handed out."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_free_blocks: int
    num_hand_over_blocks: int


@dataclass(frozen=True)
class Chunk(Generic[S]):
    """`num_tokens` may be 0: then blocks that were found, not computed, are handed out only."""

    sequence: S
    num_tokens: int
    num_new_blocks: int
    num_handed_blocks: int = 0


@dataclass
class Schedule(Generic[S]):
    """One step: `preempted` lose their blocks, then `grown` decodes get one each, then chunks theirs."""

    decodes: list[S] = field(default_factory=list)
    grown: list[S] = field(default_factory=list)
    chunks: list[Chunk[S]] = field(default_factory=list)
    preempted: list[S] = field(default_factory=list)
    is_short_of_blocks: bool = False
    """Somebody could not go on, or come back, for want of blocks."""

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing to hand out."""
        return not (self.decodes or self.chunks)


def is_decode(sequence: Schedulable) -> bool:
    """One token to compute, and no one to hand it to."""
    return sequence.num_tokens - sequence.num_computed == 1 and not sequence.hand_over


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def schedule(by_age: Sequence[S], limits: Limits, num_freed: Callable[[S], int]) -> Schedule[S]:
    """The next step of sequences that were begun, given oldest first.

    `num_freed` tells how many blocks become free when a sequence is preempted (shared ones do not).
    """
    return _Round(by_age, limits, num_freed).run()


def loading_chunk(sequence: S, limits: Limits) -> Chunk[S] | None:
    """The next chunk of a sequence that `is_loading`; None where nothing of it may run or leave now."""
    round_of_one = _Round([sequence], limits, lambda _: 0)
    round_of_one.chunk(0, sequence)
    chunks = round_of_one.schedule.chunks
    return chunks[0] if chunks else None


class _Round(Generic[S]):
    """The state of one call of `schedule`."""

    def __init__(self, by_age: Sequence[S], limits: Limits, num_freed: Callable[[S], int]) -> None:
        self.by_age = by_age
        self.limits = limits
        self.num_freed = num_freed
        self.end = len(by_age)  # sequences from here on were preempted in this round, or hold nothing
        self.free = limits.num_free_blocks
        self.seats = limits.max_num_seqs
        self.hand_over_left = limits.num_hand_over_blocks
        runs = [sequence for sequence in by_age if not sequence.is_loading]
        num_decodes = sum(1 for sequence in runs if sequence.num_blocks and is_decode(sequence))
        num_prompts = len(runs) - num_decodes
        # A prompt that is older than all decodes takes a seat, so at most this many decodes sit beside it.
        seated = min(num_decodes, limits.max_num_seqs - 1 if num_prompts else limits.max_num_seqs)
        self.prompt_tokens = limits.max_num_batched_tokens - seated
        self.may_come_back = True
        self.schedule = Schedule[S]()

    def run(self) -> Schedule[S]:
        index = 0
        while index < self.end and self.seats:
            sequence = self.by_age[index]
            if sequence.is_loading:
                pass
            elif not sequence.num_blocks:
                self.come_back(sequence)
            elif is_decode(sequence):
                self.decode(index, sequence)
            else:
                self.chunk(index, sequence)
            index += 1
        return self.schedule

    def decode(self, index: int, sequence: S) -> None:
        if sequence.num_computed < sequence.num_blocks * self.limits.block_size:
            self.schedule.decodes.append(sequence)
            self.seats -= 1
        elif self.make_room(index, 1):
            self.free -= 1
            self.schedule.decodes.append(sequence)
            self.schedule.grown.append(sequence)
            self.seats -= 1

    def chunk(self, index: int, sequence: S) -> None:
        size, computed = self.limits.block_size, sequence.num_computed
        num_tokens = min(self.prompt_tokens, sequence.num_tokens - computed, self.hand_over_tokens(sequence))
        if num_tokens > 0:
            if computed >= (sequence.num_blocks + self.free) * size:
                self.make_room(index, 1)
            num_tokens = min(num_tokens, (sequence.num_blocks + self.free) * size - computed)
        num_handed = self.num_handed(sequence, computed + max(0, num_tokens))
        if num_tokens <= 0 and not num_handed:
            return
        num_tokens = max(0, num_tokens)
        num_new = max(0, blocks_for(computed + num_tokens, size) - sequence.num_blocks)
        self.take(Chunk(sequence, num_tokens, num_new, num_handed))

    def come_back(self, sequence: S) -> None:
        """A preempted sequence: all its blocks and one token more, or nothing."""
        num_needed = blocks_for(sequence.num_tokens + 1, self.limits.block_size)
        if not self.may_come_back or num_needed > self.free:
            self.may_come_back = False
            self.schedule.is_short_of_blocks = True
            return
        num_tokens = min(self.prompt_tokens, sequence.num_tokens, self.hand_over_tokens(sequence))
        if num_tokens > 0:
            self.take(Chunk(sequence, num_tokens, num_needed, self.num_handed(sequence, num_tokens)))

    def take(self, chunk: Chunk[S]) -> None:
        self.schedule.chunks.append(chunk)
        self.prompt_tokens -= chunk.num_tokens
        self.free -= chunk.num_new_blocks
        self.hand_over_left -= chunk.num_handed_blocks
        self.seats -= 1

    def make_room(self, index: int, num_blocks: int) -> bool:
        """Preempts sequences younger than `index` from the young end until `num_blocks` are free."""
        while self.free < num_blocks and self.end > index + 1:
            self.end -= 1
            victim = self.by_age[self.end]
            # Of one that is loading, layers may have left already; they must not leave twice.
            if victim.num_blocks and not (victim.is_loading and victim.hand_over):
                self.schedule.preempted.append(victim)
                self.free += self.num_freed(victim)
        if self.free < num_blocks:
            self.schedule.is_short_of_blocks = True
        return self.free >= num_blocks

    def hand_over_tokens(self, sequence: S) -> int:
        """Tokens that may be computed so that each block they complete can be handed out."""
        if not sequence.hand_over:
            return sequence.num_tokens
        end = (sequence.num_handed_blocks + self.hand_over_left) * self.limits.block_size
        return end - sequence.num_computed

    def num_handed(self, sequence: S, end: int) -> int:
        """Blocks to hand out when tokens up to `end` are computed; a partial one only at the very end."""
        if not sequence.hand_over:
            return 0
        size = self.limits.block_size
        num_ready = blocks_for(end, size) if end == sequence.num_tokens else end // size
        return min(max(0, num_ready - sequence.num_handed_blocks), self.hand_over_left)
