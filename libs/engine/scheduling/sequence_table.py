"""Who holds which blocks: every sequence of the engine, from its reservation to its end. No tensors here.

A sequence can never outgrow the pool: its length is bounded by what the whole pool holds, and it ends there
with LENGTH.
"""

import math
from bisect import insort
from collections.abc import Mapping
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from libs.cost.load import WorkerLoad
from libs.cost.prefill import PrefillCost, prefill_seconds
from libs.engine.errors import (
    BadBlocks,
    DuplicateSequence,
    InvalidSequence,
    PromptTooLong,
    UnknownSequence,
    WrongState,
)
from libs.engine.memory.allocator import BlockAllocator
from libs.engine.outputs import Reservation, SequenceFailed, TokenOutput
from libs.engine.scheduling.rows import Rows
from libs.engine.scheduling.scheduler import Chunk, Schedule, blocks_for
from libs.engine.scheduling.sequence import Arrivals, Sequence, SequenceState, Span
from libs.engine.settings import EngineSettings
from libs.request.generation import Generation
from libs.request.outcome import FailureReason

_SEQUENCES_PER_SEAT = 4
"""Sequences held at once per sequence of a step: begun ones that wait cost memory, and gain nothing."""


class SequenceTable:
    """All sequences and all blocks; each operation leaves them consistent. `Engine` states the contract of
    `reserve`, `begin`, `start_decode` and `abort`."""

    def __init__(
        self,
        settings: EngineSettings,
        num_blocks: int,
        *,
        fingerprint: str,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        num_layers: int,
    ) -> None:
        self.settings = settings
        self.block_size = settings.block_size
        self.max_len = min(settings.max_model_len, num_blocks * settings.block_size)
        self.allocator = BlockAllocator(num_blocks)
        self.rows = Rows(blocks_for(self.max_len, settings.block_size))
        self.by_id: dict[str, Sequence] = {}
        self.by_age: list[Sequence] = []
        """Those that were begun, oldest first."""
        self.is_short_of_blocks = False
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._num_layers = num_layers
        self._num_arrived = 0

    def get(self, sequence_id: str) -> Sequence:
        """Raises UnknownSequence."""
        sequence = self.by_id.get(sequence_id)
        if sequence is None:
            raise UnknownSequence(sequence_id)
        return sequence

    def reserve(self, generation: Generation, sequence_id: str, *, whole_prompt: bool) -> Reservation | None:
        """Holds blocks, or None when there is no room now.

        Room is kept for begun sequences to grow by a block each, and none is given while one of them goes
        short.
        """
        num_tokens = self._check(generation, sequence_id)
        if len(self.by_id) >= _SEQUENCES_PER_SEAT * self.settings.max_num_seqs:
            return None
        if self.is_short_of_blocks and self.by_age:
            return None
        sequence = Sequence(
            sequence_id, generation, arrival=self._num_arrived, max_len=self.max_len, eos_ids=self._eos_ids
        )
        hits = self._find(sequence, 0, (num_tokens - 1) // self.block_size)
        held = num_tokens + 1 if whole_prompt else min(num_tokens + 1, self.settings.max_num_batched_tokens)
        num_new = max(blocks_for(held, self.block_size) - len(hits), 1)
        if num_new + self.allocator.num_cached(hits) + len(self.by_age) > self.allocator.num_free:
            return None
        self.allocator.acquire(hits)
        sequence.blocks = hits + self.allocator.allocate(num_new)
        sequence.num_found_blocks = sequence.num_named_blocks = len(hits)
        self._num_arrived += 1
        self.by_id[sequence_id] = sequence
        return Reservation(sequence_id, sequence.num_blocks, len(hits))

    def begin(
        self,
        sequence_id: str,
        *,
        num_computed_tokens: int,
        hand_over: bool = False,
        first_block: int = 0,
        awaits_kv: bool = False,
    ) -> None:
        """Lets the scheduler take it; KV of `num_computed_tokens` is there, or with `awaits_kv` will be."""
        sequence = self.get(sequence_id)
        if not 0 <= num_computed_tokens <= min(sequence.num_tokens, sequence.num_blocks * self.block_size):
            raise BadBlocks(
                f"KV of {num_computed_tokens} tokens cannot be there: sequence {sequence_id!r} has "
                f"{sequence.num_tokens} tokens and {sequence.num_blocks} blocks"
            )
        found = max(num_computed_tokens, sequence.num_found_blocks * self.block_size)
        awaited = blocks_for(num_computed_tokens, self.block_size) if awaits_kv else 0
        self._enter(sequence, min(found, sequence.num_tokens - 1), num_awaited_blocks=awaited)
        sequence.num_cached_tokens = sequence.num_computed
        sequence.hand_over = hand_over
        sequence.num_handed_blocks = first_block

    def arrivals(self, sequence: Sequence) -> Arrivals:
        """The record of what was written into the sequence from outside."""
        if sequence.arrivals is None:
            sequence.arrivals = Arrivals(self._num_layers, sequence.num_blocks)
        return sequence.arrivals

    def loaded(self, sequence: Sequence) -> None:
        """All its KV has come: it runs with the others, and its blocks can be found."""
        sequence.is_loading, sequence.arrivals = False, None
        self.computed(sequence, sequence.num_computed)

    def start_decode(self, sequence_id: str, first: TokenOutput) -> SequenceFailed | None:
        """Takes in a sequence with all its KV and its first token. Returns a failure where the limits of this
        engine end it with that token and `first` did not say so.

        Raises WrongState where not all KV can be there, or the token is not the next one.
        """
        sequence = self.get(sequence_id)
        has_blocks = sequence.num_tokens <= sequence.num_blocks * self.block_size
        if not has_blocks or first.index != sequence.num_output_tokens:
            raise WrongState(
                f"output token {first.index} does not fit sequence {sequence_id!r}: it has "
                f"{sequence.num_tokens} tokens, {sequence.num_output_tokens} of them output, and "
                f"{sequence.num_blocks} blocks"
            )
        self._check_ids(np.array([first.token_id]))
        self._enter(sequence, sequence.num_tokens)
        sequence.is_first_token = False
        finish = sequence.append(first.token_id)
        self.rows.set_tokens(sequence)
        if first.finish is None and finish is None:
            return None
        self.end(sequence)
        if first.finish is not None:
            return None
        detail = f"the sequence is over for this engine, whose limit is {self.max_len} tokens"
        return SequenceFailed(sequence_id, FailureReason.INTERNAL, detail)

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence from any state. Unknown ids are ignored."""
        sequence = self.by_id.get(sequence_id)
        if sequence is not None:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """From any state; everything it held is free, named blocks can still be found. So can those whose KV
        had come whole, where the rest was still awaited: who begins it anew need not compute them."""
        if sequence.is_begun:
            self.by_age.remove(sequence)
        sequence.go(SequenceState.FINISHED)
        if sequence.is_loading:
            num_whole_tokens = self.arrivals(sequence).num_whole_blocks * self.block_size
            sequence.is_loading, sequence.arrivals = False, None
            self.computed(sequence, min(num_whole_tokens, sequence.num_computed))
        self.rows.give_back(sequence)
        self.allocator.release(sequence.blocks)
        sequence.blocks = []
        self.by_id.pop(sequence.id, None)

    def fail(self, sequence: Sequence, reason: FailureReason, detail: str) -> SequenceFailed:
        """Ends it, and says why."""
        self.end(sequence)
        return SequenceFailed(sequence.id, reason, detail)

    def next_deadline(self) -> float | None:
        """Unix seconds of the earliest deadline of all sequences."""
        deadlines = (sequence.generation.deadline_unix_seconds for sequence in self.by_id.values())
        return min(deadlines, default=None)

    def expire(self, now: float) -> list[SequenceFailed]:
        """Ends every sequence whose deadline has passed."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return []
        late = [one for one in self.by_id.values() if one.generation.deadline_unix_seconds <= now]
        detail = "its deadline passed in the engine"
        return [self.fail(one, FailureReason.DEADLINE, detail) for one in late]

    def apply(self, plan: Schedule[Sequence], now: float) -> list[Span]:
        """Moves blocks as the schedule says; returns what is to be computed of each chunk."""
        self.is_short_of_blocks = plan.is_short_of_blocks
        for victim in plan.preempted:
            self._preempt(victim)
        for sequence in plan.grown:
            self._grow(sequence, 1)
        for sequence in plan.decodes:
            if sequence.state is not SequenceState.RUNNING:
                self._start(sequence, now)
        return [self.place(chunk, now) for chunk in plan.chunks]

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of the first `num_tokens` is in the pool; blocks that got full can now be found."""
        sequence.num_computed = num_tokens
        if sequence.is_loading:
            return
        num_full = num_tokens // self.block_size
        if num_full > sequence.num_named_blocks and self.settings.prefix_cache:
            names = sequence.name_blocks(num_full, self._fingerprint, self.block_size)
            for index in range(sequence.num_named_blocks, num_full):
                self.allocator.name(sequence.blocks[index], names[index])
            sequence.num_named_blocks = num_full

    def num_freed(self, sequence: Sequence) -> int:
        """Blocks that preempting it would free."""
        return self.allocator.num_exclusive(sequence.blocks)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks held by sequences that were not begun, and so cannot be preempted."""
        return len({block for one in self.by_id.values() if not one.is_begun for block in one.blocks})

    def preempt_youngest(self) -> None:
        """Takes the blocks of the youngest begun sequence that holds some."""
        self._preempt(next(one for one in reversed(self.by_age) if one.blocks))

    def preempt_all(self) -> None:
        """Takes the blocks of all begun sequences."""
        for sequence in self.by_age:
            if sequence.state is not SequenceState.PREEMPTED:
                self._preempt(sequence)

    def rename_blocks(self, num_blocks: int, moved: Mapping[int, int]) -> None:
        """There are `num_blocks` now, and live blocks got other ids."""
        self.allocator.resize(num_blocks, moved)
        if not moved:
            return
        for sequence in self.by_id.values():
            sequence.blocks = [moved.get(block, block) for block in sequence.blocks]
            if sequence.row >= 0:
                self.rows.set_blocks(sequence, 0)

    def load(self, prefill_cost: PrefillCost) -> WorkerLoad:
        """Counts, and the work that they mean at this cost; the rates are the meter's."""
        running = SequenceState.RUNNING
        num_running = sum(1 for sequence in self.by_age if sequence.state is running)
        prompts = [one for one in self.by_age if one.num_tokens - one.num_computed > 1]
        queued = (
            prefill_seconds(
                prefill_cost,
                one.num_tokens - one.num_computed,
                one.num_computed,
                max_step_tokens=self.settings.max_num_batched_tokens,
            )
            for one in prompts
        )
        return WorkerLoad(
            num_running=num_running,
            num_waiting=len(self.by_age) - num_running,
            num_reserved=len(self.by_id) - len(self.by_age),
            num_waiting_tokens=sum(one.num_tokens - one.num_computed for one in prompts),
            num_blocks=self.allocator.num_blocks,
            num_used_blocks=self.allocator.num_used,
            block_size=self.block_size,
            queued_seconds=sum(queued),
        )

    def _check(self, generation: Generation, sequence_id: str) -> int:
        """Raises what makes this generation impossible; else its number of tokens."""
        if sequence_id in self.by_id:
            raise DuplicateSequence(f"sequence {sequence_id!r} is here already; an attempt needs its own id")
        if math.isnan(generation.deadline_unix_seconds):
            raise InvalidSequence(f"the deadline of sequence {sequence_id!r} is NaN; give unix seconds")
        token_ids = np.frombuffer(generation.token_ids, dtype="<i4")
        if not 0 < generation.num_prompt_tokens <= len(token_ids):
            raise InvalidSequence(
                f"a prompt needs at least one token: sequence {sequence_id!r} has {len(token_ids)} tokens, "
                f"{generation.num_prompt_tokens} of them prompt"
            )
        self._check_ids(token_ids)
        if len(token_ids) + 1 > self.max_len:
            raise PromptTooLong(len(token_ids), self.max_len)
        return len(token_ids)

    def _check_ids(self, token_ids: NDArray[np.integer]) -> None:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            raise InvalidSequence(
                f"token ids from {lowest} to {highest}; the vocabulary goes from 0 to {self._vocab_size - 1}"
            )

    def _find(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """Blocks found by name for block indices `first <= index < end`, as far as the run goes."""
        if not self.settings.prefix_cache or first >= end:
            return []
        names = sequence.name_blocks(end, self._fingerprint, self.block_size)
        return self.allocator.find(names[first:end])

    def _enter(self, sequence: Sequence, num_computed: int, *, num_awaited_blocks: int = 0) -> None:
        """From reserved or loading to waiting."""
        sequence.go(SequenceState.WAITING)
        if num_awaited_blocks > sequence.num_found_blocks:
            arrivals = self.arrivals(sequence)
            arrivals.expect(sequence.num_found_blocks, num_awaited_blocks)
            sequence.is_loading = not arrivals.are_complete
        if not sequence.is_loading:
            sequence.arrivals = None
        self.computed(sequence, num_computed)
        self.rows.take(sequence)
        insort(self.by_age, sequence, key=attrgetter("arrival"))

    def _preempt(self, sequence: Sequence) -> None:
        sequence.go(SequenceState.PREEMPTED)
        self.allocator.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_named_blocks = 0
        sequence.is_loading, sequence.arrivals = False, None

    def _grow(self, sequence: Sequence, num_blocks: int) -> None:
        first = sequence.num_blocks
        sequence.blocks += self.allocator.allocate(num_blocks)
        self.rows.set_blocks(sequence, first)

    def _start(self, sequence: Sequence, now: float) -> None:
        sequence.go(SequenceState.RUNNING)
        sequence.prefill_started_unix_seconds = sequence.prefill_started_unix_seconds or now

    def place(self, chunk: Chunk[Sequence], now: float) -> Span:
        """Blocks for a chunk; less is computed where others have left KV of the same tokens meanwhile."""
        sequence = chunk.sequence
        end = sequence.num_computed + chunk.num_tokens
        num_needed = sequence.num_blocks + chunk.num_new_blocks
        if sequence.state is not SequenceState.RUNNING:
            is_fresh = sequence.state is SequenceState.WAITING
            self._start(sequence, now)
            self._take_found(sequence)
            # What was preempted finds its own blocks again; these were computed, not found.
            max_cached = sequence.num_tokens if is_fresh else sequence.num_cached_tokens
            sequence.num_cached_tokens = min(max_cached, sequence.num_computed)
        self._grow(sequence, num_needed - sequence.num_blocks)
        if not sequence.hand_over:  # a hand-over must not run ahead of the blocks that may leave
            end = min(
                sequence.num_computed + chunk.num_tokens, sequence.num_tokens, num_needed * self.block_size
            )
        return Span(sequence, sequence.num_computed, max(end, sequence.num_computed))

    def _take_found(self, sequence: Sequence) -> None:
        """Exchanges empty blocks for ones found by name; a preempted sequence has none to give."""
        first, rest = divmod(sequence.num_computed, self.block_size)
        end = (sequence.num_tokens - 1) // self.block_size
        if rest or not (hits := self._find(sequence, first, end)):
            return
        if sequence.blocks:
            hits = hits[: sequence.num_blocks - first]
        self.allocator.acquire(hits)
        self.allocator.release(sequence.blocks[first : first + len(hits)])
        sequence.blocks[first : first + len(hits)] = hits
        self.rows.set_blocks(sequence, first)
        self.computed(sequence, (first + len(hits)) * self.block_size)
