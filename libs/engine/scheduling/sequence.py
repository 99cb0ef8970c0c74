"""One sequence inside the engine: its tokens, its blocks, and what it is doing.

    reserved ──► loading ──► waiting ──► running ──► finished
        │           │           ▲           │ ▲
        └───────────┴── begin ──┘           ▼ │
                                        preempted

`start_decode` goes the same way as `begin`. Every state may go to finished: an end frees everything. A
sequence begun while its KV is still being written `is_loading` in waiting and running, until all of it is
there.
"""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from libs.engine.errors import WrongState
from libs.kv.names import block_names, next_name
from libs.request.generation import Generation, unpack_token_ids
from libs.request.outcome import FinishReason
from libs.request.sampling import SamplingParams


class Arrivals:
    """Which blocks of which layer were written; `expect` says up to where they will be."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._is_there = np.zeros((num_layers, num_blocks), dtype=bool)
        self._num_missing = np.zeros(num_layers, dtype=np.int64)
        self.end_block = num_blocks

    def add(self, layer: int, first_block: int, end_block: int) -> None:
        """Blocks `first_block <= index < end_block` of a layer are there."""
        there = self._is_there[layer, first_block:end_block]
        self._num_missing[layer] -= np.count_nonzero(~there)
        there[:] = True

    def has(self, layer: int, first_block: int, end_block: int) -> bool:
        """Whether all of these were written."""
        return bool(self._is_there[layer, first_block:end_block].all())

    def expect(self, first_block: int, end_block: int) -> None:
        """Blocks that must be there; those before `first_block` are, those from `end_block` on never come."""
        self.end_block = end_block
        self._num_missing[:] = np.count_nonzero(~self._is_there[:, first_block:end_block], axis=1)
        self._is_there[:, :first_block] = True
        self._is_there[:, end_block:] = True

    def is_whole(self, layer: int) -> bool:
        """Whether every expected block of the layer is there."""
        return not self._num_missing[layer]

    @property
    def num_whole_blocks(self) -> int:
        """So many of the first expected blocks are there in every layer; after `expect`."""
        is_whole = self._is_there[:, : self.end_block].all(axis=0)
        return self.end_block if is_whole.all() else int(is_whole.argmin())

    @property
    def are_complete(self) -> bool:
        """Whether every layer is whole."""
        return not self._num_missing.any()


class SeenTokens:
    """Distinct token ids with their output counts, in arrays that grow, so that a step copies no history.

    A token of the prompt alone has the count 0.
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(256, dtype=np.int64)
        self._counts = np.zeros(256, dtype=np.float32)
        for token_id in token_ids[:num_prompt_tokens]:
            self._find(token_id)
        for token_id in token_ids[num_prompt_tokens:]:
            self.add(token_id)

    @classmethod
    def when_needed(
        cls, token_ids: list[int], num_prompt_tokens: int, sampling: SamplingParams
    ) -> "SeenTokens | None":
        """None where no penalty asks for it."""
        if not has_penalties(sampling):
            return None
        return cls(token_ids, num_prompt_tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct token ids of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` is in the output."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._find(token_id)  # first: it may replace the arrays
        self._counts[place] += 1

    def _find(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        return place


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether earlier tokens change the logits."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class SequenceState(Enum):
    """What a sequence is doing."""

    RESERVED = auto()
    """Blocks are held; nothing was written yet."""
    LOADING = auto()
    """KV is being written from outside."""
    WAITING = auto()
    """Begun; not yet part of a step."""
    RUNNING = auto()
    """Part of steps."""
    PREEMPTED = auto()
    """Gave its blocks back; all its tokens will be computed again."""
    FINISHED = auto()
    """Holds nothing."""


_NEXT = {
    SequenceState.RESERVED: {SequenceState.LOADING, SequenceState.WAITING},
    SequenceState.LOADING: {SequenceState.LOADING, SequenceState.WAITING},
    SequenceState.WAITING: {SequenceState.RUNNING, SequenceState.PREEMPTED},
    SequenceState.RUNNING: {SequenceState.PREEMPTED},
    SequenceState.PREEMPTED: {SequenceState.RUNNING},
    SequenceState.FINISHED: set[SequenceState](),
}


class Sequence:
    """Mutable; the engine's thread owns it."""

    __slots__ = (
        "arrival",
        "arrivals",
        "blocks",
        "generation",
        "hand_over",
        "id",
        "is_first_token",
        "is_loading",
        "max_num_tokens",
        "names",
        "num_cached_tokens",
        "num_computed",
        "num_found_blocks",
        "num_handed_blocks",
        "num_named_blocks",
        "num_prompt_tokens",
        "prefill_started_unix_seconds",
        "row",
        "seen",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: str,
        generation: Generation,
        *,
        arrival: int,
        max_len: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        sampling = generation.sampling
        self.id = sequence_id
        self.generation = generation
        self.arrival = arrival
        self.token_ids = unpack_token_ids(generation.token_ids)
        self.num_prompt_tokens = generation.num_prompt_tokens
        self.max_num_tokens = min(max_len, self.num_prompt_tokens + sampling.max_tokens)
        self.stop_ids = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids))
        self.state = SequenceState.RESERVED
        self.blocks: list[int] = []
        self.names: list[bytes] = []
        self.num_named_blocks = 0
        self.num_computed = 0
        self.num_found_blocks = 0
        self.num_cached_tokens = 0
        self.prefill_started_unix_seconds = 0.0
        self.is_first_token = True
        self.hand_over = False
        self.arrivals: Arrivals | None = None
        self.is_loading = False
        self.num_handed_blocks = 0
        self.row = -1
        self.seen = SeenTokens.when_needed(self.token_ids, self.num_prompt_tokens, sampling)

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks held now."""
        return len(self.blocks)

    @property
    def num_output_tokens(self) -> int:
        """Over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_begun(self) -> bool:
        """Whether the scheduler may take it."""
        return self.state in (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED)

    def go(self, state: SequenceState) -> None:
        """Changes the state. Raises WrongState where none leads there."""
        if state is not SequenceState.FINISHED and state not in _NEXT[self.state]:
            now, then = self.state.name.lower(), state.name.lower()
            raise WrongState(f"sequence {self.id!r} is {now}; it cannot be {then} next")
        self.state = state

    def append(self, token_id: int) -> FinishReason | None:
        """Takes its next token; tells whether it was the last."""
        self.token_ids.append(token_id)
        if self.seen is not None:
            self.seen.add(token_id)
        if token_id in self.stop_ids and self.num_output_tokens > self.generation.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_num_tokens else None

    def name_blocks(self, num_blocks: int, fingerprint: str, block_size: int) -> list[bytes]:
        """Names of the first `num_blocks` full blocks, made as far as they were not yet."""
        if not self.names:
            self.names = block_names(self.token_ids, block_size, fingerprint, self.generation.cache_salt)
        for index in range(len(self.names), num_blocks):
            tokens = np.asarray(self.token_ids[index * block_size : (index + 1) * block_size], dtype="<i4")
            if not index:
                self.names = block_names(tokens, block_size, fingerprint, self.generation.cache_salt)
            else:
                self.names.append(next_name(self.names[-1], tokens.tobytes()))
        return self.names[:num_blocks]


@dataclass(frozen=True)
class Span:
    """Tokens `first <= position < end` of a sequence, to be computed in this step."""

    sequence: Sequence
    first: int
    end: int

    @property
    def wants_token(self) -> bool:
        """Whether the next token is chosen from this chunk's last row."""
        return self.end == self.sequence.num_tokens
