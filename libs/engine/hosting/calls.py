"""What a home asks of the modules that a host runs for it. The host does it in the order of the calls.

Block ids are the home's own: a host keeps, for each module, as many blocks as the home has, under the same
ids. So block tables and slots of a step mean the same on both sides, and nobody translates. Over a Link the
structs travel as they are, their arrays in the body of the message.
"""

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class BeginStep(msgspec.Struct, frozen=True, eq=False, tag="step"):
    """The arrays of the step that the next calls belong to, shapes as in `AttentionBatch`. No answer."""

    positions: Int64
    """`[T]`."""
    slots: Int64
    """`[T]`: block * block_size + offset."""
    block_tables: Int32
    context_lens: Int32
    query_starts: Int32
    max_query_len: int
    max_context_len: int
    last_tokens: Int64 | None
    """Rows whose hidden states are wanted of the model's last layer; None: all."""


class RunLayers(msgspec.Struct, frozen=True, eq=False, tag="layers"):
    """All layers of a LAYERS module. Answer: hidden states `[T, d]`; of the model's last layer only the rows
    of `last_tokens`, and `[0, d]` where there are none."""

    move_id: str
    hidden: torch.Tensor
    """`[T, d]`."""


class Attend(msgspec.Struct, frozen=True, eq=False, tag="attend"):
    """Attention of a HEADS module in one layer, k and v stored first. Answer:
    `[T, moved q heads, head_dim]`."""

    move_id: str
    layer: int
    q: torch.Tensor
    """`[T, moved q heads, head_dim]`, in the order of the module's KV heads, each with all its queries."""
    k: torch.Tensor
    """`[T, moved KV heads, head_dim]`."""
    v: torch.Tensor


class AttendLent(msgspec.Struct, frozen=True, eq=False, tag="attend_lent"):
    """Attention over the blocks that a TOKENS module lends, in one layer; k and v of those tokens that lie
    there are stored first. Answer: `[T, Hq, head_dim + 1]` float32, last the log-sum-exp of each row (-inf
    where a query sees none of the blocks)."""

    move_id: str
    layer: int
    first_block: int
    """The home's id of the first lent block: ids of the step from here on are the module's, less this. Blocks
    of a TOKENS module are named by its own ids, from 0, in `WriteBlocks` and `ReadBlocks`."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class WriteBlocks(msgspec.Struct, frozen=True, eq=False, tag="write"):
    """KV into blocks. `kv` is `[n, slots, 2, block_size, head_dim]`: the module's slots, or with `layer`
    those of that layer. No answer."""

    move_id: str
    layer: int | None
    blocks: Int64
    """`[n]` ids."""
    kv: torch.Tensor


class ReadBlocks(msgspec.Struct, frozen=True, eq=False, tag="read"):
    """Answer: a copy, shaped as in `WriteBlocks`."""

    move_id: str
    layer: int | None
    blocks: Int64


class MoveBlocks(msgspec.Struct, frozen=True, eq=False, tag="move"):
    """The home's blocks got other ids: the content follows. A module that is not in use yet may have fewer
    blocks than that; it holds nothing of the others. No answer."""

    ids: Int64
    """`[2, n]`: old ids, new ids."""


class Settle(msgspec.Struct, frozen=True, eq=False, tag="settle"):
    """Answer: an empty tensor, once everything asked before is done."""


HostedCall = BeginStep | RunLayers | Attend | AttendLent | WriteBlocks | ReadBlocks | MoveBlocks | Settle
ANSWERED = (RunLayers, Attend, AttendLent, ReadBlocks, Settle)
"""Calls that the home waits for. What another call breaks is told by the next answer."""


def move_id_of(call: HostedCall) -> str:
    """Of the one module that a call is for; empty where it is for all that the home has there."""
    return "" if isinstance(call, BeginStep | MoveBlocks | Settle) else call.move_id
