"""What the engine hands out. Structs where there is one per token: dataclasses are made much more slowly."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from libs.placement.placement import Placement
from libs.request.outcome import FailureReason, FinishReason
from libs.request.sampling import TokenLogprobs


class TokenOutput(msgspec.Struct, frozen=True):
    """One token of one sequence; with `finish` it is the last."""

    sequence_id: str
    index: int
    """Counted over all attempts: tokens before it, less the prompt's."""
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found, not computed; told with the first token of an attempt, else 0."""
    prefill_started_unix_seconds: float = 0.0
    """When the prompt's first chunk began; told with the first token of an attempt, else 0."""


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """KV of consecutive blocks of one sequence in one layer; the receiver owns the copy.

    `blocks` is contiguous, `[n, num_kv_heads, 2, block_size, head_dim]`; only the prompt's last block may be
    partly filled. Blocks come in order, each once per layer, also when the sequence was preempted between.
    """

    sequence_id: str
    layer: int
    first_block: int
    blocks: torch.Tensor


class SequenceFailed(msgspec.Struct, frozen=True):
    """The end of a sequence that could not come to its own end; everything it held is free."""

    sequence_id: str
    reason: FailureReason
    detail: str


@dataclass
class StepOutput:
    """What one step gave. `num_tokens` went through the model; `is_idle`: nothing to do until a command.

    `stored` and `removed` are names of blocks that can be found now and could not before, and the reverse.
    """

    tokens: list[TokenOutput] = field(default_factory=list)
    prompts_done: list[TokenOutput] = field(default_factory=list)
    failed: list[SequenceFailed] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    is_idle: bool = False


@dataclass(frozen=True)
class Reservation:
    """Blocks held for a prompt. The first `num_cached_blocks` hold their KV already and are never written."""

    sequence_id: str
    num_blocks: int
    num_cached_blocks: int


@dataclass(frozen=True)
class CopyProgress:
    """After a piece of KV was copied: blocks that are left now, and the bytes of the piece."""

    num_left_blocks: int
    num_copied_bytes: int


@dataclass(frozen=True)
class Switched:
    """A module is where it should be. `pause_seconds`: no step could run meanwhile; `num_bytes` of KV were
    copied in all; the pool had so many blocks before and after."""

    placement: Placement
    pause_seconds: float
    num_bytes: int
    num_blocks_before: int
    num_blocks_after: int


class EngineListener(Protocol):
    """Hears what the engine makes. Called on the event loop, synchronously; must not block."""

    def on_tokens(self, tokens: Sequence[TokenOutput], /) -> None:
        """All tokens of one step, one call."""
        ...

    def on_layer(self, output: LayerOutput, /) -> None:
        """A layer of a chunk of a sequence begun with `hand_over`; `release_layer` when it was sent."""
        ...

    def on_prompt_done(self, output: TokenOutput, /) -> None:
        """First token of a `hand_over` sequence, after all its layers; its blocks are free again."""
        ...

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes], /) -> None:
        """Names of blocks that can be found here since the last call, and that no longer can; one call a
        step."""
        ...

    def on_failed(self, failure: SequenceFailed, /) -> None:
        """The sequence is over without an end of its own. Not called for `abort`."""
        ...
