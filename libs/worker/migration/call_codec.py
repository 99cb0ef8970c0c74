"""Calls of a home as the heads and tensors that travel, and back."""

from collections.abc import Sequence

import numpy as np
import torch

from libs.engine.hosting.calls import (
    Attend,
    AttendLent,
    BeginStep,
    HostedCall,
    MoveBlocks,
    ReadBlocks,
    RunLayers,
    Settle,
    WriteBlocks,
)
from libs.worker.migration.framing import BadFrame, Tensor
from libs.worker.migration.protocol import (
    AttendCall,
    AttendLentCall,
    CallFacts,
    LayersCall,
    MoveCall,
    ReadCall,
    SettleCall,
    StepCall,
    WriteCall,
)

_NUM_STEP_ARRAYS = 5


def split_call(call: HostedCall) -> tuple[CallFacts, Sequence[Tensor]]:
    """What a call says, and its arrays in order."""
    match call:
        case BeginStep():
            return _split_step(call)
        case RunLayers():
            return LayersCall(move_id=call.move_id), (call.hidden,)
        case Attend():
            return AttendCall(move_id=call.move_id, layer=call.layer), (call.q, call.k, call.v)
        case AttendLent():
            facts = AttendLentCall(move_id=call.move_id, layer=call.layer, first_block=call.first_block)
            return facts, (call.q, call.k, call.v)
        case WriteBlocks():
            return WriteCall(move_id=call.move_id, layer=call.layer), (call.blocks, call.kv)
        case ReadBlocks():
            return ReadCall(move_id=call.move_id, layer=call.layer), (call.blocks,)
        case MoveBlocks():
            ids = np.array([list(call.moved.keys()), list(call.moved.values())], dtype=np.int64)
            return MoveCall(), (ids,)
        case Settle():
            return SettleCall(), ()


def join_call(facts: CallFacts, tensors: Sequence[torch.Tensor]) -> HostedCall:
    """The inverse of `split_call`. Raises BadFrame where the tensors are not the call's."""
    try:
        return _join(facts, tensors)
    except (ValueError, TypeError) as error:
        raise BadFrame(f"{type(facts).__name__} with {len(tensors)} tensors: {error}") from error


def _split_step(step: BeginStep) -> tuple[CallFacts, Sequence[Tensor]]:
    facts = StepCall(
        max_query_len=step.max_query_len,
        max_context_len=step.max_context_len,
        has_last_tokens=step.last_tokens is not None,
    )
    arrays = (step.positions, step.slots, step.block_tables, step.context_lens, step.query_starts)
    return facts, arrays if step.last_tokens is None else (*arrays, step.last_tokens)


def _join(facts: CallFacts, tensors: Sequence[torch.Tensor]) -> HostedCall:
    match facts:
        case StepCall():
            return _join_step(facts, tensors)
        case LayersCall():
            (hidden,) = tensors
            return RunLayers(facts.move_id, hidden)
        case AttendCall():
            q, k, v = tensors
            return Attend(facts.move_id, facts.layer, q, k, v)
        case AttendLentCall():
            q, k, v = tensors
            return AttendLent(facts.move_id, facts.layer, facts.first_block, q, k, v)
        case WriteCall():
            blocks, kv = tensors
            return WriteBlocks(facts.move_id, facts.layer, blocks.numpy(), kv)
        case ReadCall():
            (blocks,) = tensors
            return ReadBlocks(facts.move_id, facts.layer, blocks.numpy())
        case MoveCall():
            (ids,) = tensors
            old, new = ids.tolist()
            return MoveBlocks(dict(zip(old, new, strict=True)))
        case SettleCall():
            () = tensors
            return Settle()


def _join_step(facts: StepCall, tensors: Sequence[torch.Tensor]) -> BeginStep:
    arrays = [tensor.numpy() for tensor in tensors]
    if len(arrays) != _NUM_STEP_ARRAYS + facts.has_last_tokens:
        raise ValueError("the arrays of a step are not complete")
    return BeginStep(
        positions=arrays[0],
        slots=arrays[1],
        block_tables=arrays[2],
        context_lens=arrays[3],
        query_starts=arrays[4],
        max_query_len=facts.max_query_len,
        max_context_len=facts.max_context_len,
        last_tokens=arrays[_NUM_STEP_ARRAYS] if facts.has_last_tokens else None,
    )
