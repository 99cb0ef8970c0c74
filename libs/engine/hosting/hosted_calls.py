"""The effect of each call of an owner on its modules here."""

import math
from collections.abc import Generator

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
from libs.engine.hosting.hosted_step import BadCall, HostedStep
from libs.engine.hosting.owner import HostedModule, Owner
from libs.engine.hosting.split_context import ContextPart, split_context
from libs.model.config import ModelConfig
from libs.placement.module import ModuleKind

Pieces = Generator[None, None, torch.Tensor]
"""A call that pauses between layers; returns its answer."""


class HostedCalls:
    """Checks a call and does it; `run` raises BadCall for one that cannot be."""

    def __init__(
        self, config: ModelConfig, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._scale = 1 / math.sqrt(config.head_dim)

    def run(self, owner: Owner, call: HostedCall) -> Pieces:
        """Does the call, layer by layer; the answer is empty where the call has none."""
        match call:
            case BeginStep():
                owner.step = HostedStep(call, self._block_size, self._device)
            case RunLayers():
                return (yield from self._run_layers(owner, call))
            case Attend():
                return self._attend(owner, call)
            case AttendLent():
                return self._attend_remote(owner, call)
            case WriteBlocks():
                owner.any_module(call.move_id).kv.write(call.layer, call.blocks, call.kv)
            case ReadBlocks():
                return owner.any_module(call.move_id).kv.read(call.layer, call.blocks)
            case MoveBlocks():
                moved = _moved(call)
                for one in owner.modules.values():
                    if one.module.kind is not ModuleKind.TOKENS:  # those have ids of their own
                        one.kv.move(moved)
            case Settle():
                pass
        return torch.empty(0)

    def _run_layers(self, owner: Owner, call: RunLayers) -> Pieces:
        here = owner.module(call.move_id, ModuleKind.LAYERS)
        model, step = here.model, _step(owner, here)
        if model is None:
            raise BadCall(f"the module of move {call.move_id!r} has no weights")
        owner.busy_with = here
        hidden = self._checked(call.hidden, "hidden states", (step.num_tokens, model.config.hidden_size))
        rotary, last = step.rotary(model), model.config.num_layers - 1
        for layer in here.module.layers:
            if layer > here.module.first_layer:
                yield
            q, k, v = model.attention_inputs(layer, hidden, rotary)
            kv = here.kv.layer(layer)
            here.attention.write_kv(k, v, kv, step.slots)
            wanted = step.last_tokens if layer == last else None
            if wanted is not None and not len(wanted):
                return hidden[:0]
            attended = here.attention.attend(q, kv, step.batch, self._scale)
            if wanted is not None:
                hidden, attended = hidden[wanted], attended[wanted]
            hidden = model.mlp(layer, model.attention_output(layer, hidden, attended))
        return hidden

    def _attend(self, owner: Owner, call: Attend) -> torch.Tensor:
        here = owner.module(call.move_id, ModuleKind.HEADS)
        step, kv = _step(owner, here), here.kv.layer(call.layer)
        q, k, v = self._heads(call, step, kv.shape[1])
        here.attention.write_kv(k, v, kv, step.slots)
        return here.attention.attend(q, kv, step.batch, self._scale)

    def _attend_remote(self, owner: Owner, call: AttendLent) -> torch.Tensor:
        here = owner.module(call.move_id, ModuleKind.TOKENS)
        step, kv = owner.step, here.kv.layer(call.layer)
        if step is None:
            raise BadCall("no step was begun")
        q, k, v = self._heads(call, step, kv.shape[1])
        part = self._context(here, step, call.first_block)
        if len(part.tokens):
            here.attention.write_kv(k[part.tokens], v[part.tokens], kv, part.slots)
        attended, lse = here.attention.attend_with_lse(q, kv, part.batch, self._scale)
        return torch.cat([attended.to(torch.float32), lse[..., None]], dim=-1)

    def _context(self, here: HostedModule, step: HostedStep, first_block: int) -> ContextPart:
        """The module's part of a step, the same for all layers. Raises BadCall where the step has higher ids
        than the module has blocks."""
        if here.context is None or here.context[:2] != (step, first_block):
            end_block = first_block + here.kv.num_blocks
            if first_block < 0 or step.end_block > end_block:
                raise BadCall(
                    f"blocks up to {step.end_block - 1} from {first_block} on; {here.kv.num_blocks} are lent"
                )
            part = split_context(step.begun, first_block, end_block, self._block_size, self._device)
            here.context = (step, first_block, part)
        return here.context[2]

    def _heads(
        self, call: Attend | AttendLent, step: HostedStep, num_kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        num_heads = num_kv_heads * (config.num_heads // config.num_kv_heads)
        q = self._checked(call.q, "q", (step.num_tokens, num_heads, config.head_dim))
        k = self._checked(call.k, "k", (step.num_tokens, num_kv_heads, config.head_dim))
        v = self._checked(call.v, "v", (step.num_tokens, num_kv_heads, config.head_dim))
        return q, k, v

    def _checked(self, tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if tensor.dtype != self._dtype or tensor.shape != shape:
            raise BadCall(
                f"{name} came as {tensor.dtype} {list(tensor.shape)}, not {self._dtype} {list(shape)}"
            )
        return tensor.to(self._device)


def _moved(call: MoveBlocks) -> dict[int, int]:
    """Old ids to new ones. Raises BadCall."""
    if call.ids.dtype != np.int64 or call.ids.ndim != 2 or len(call.ids) != 2:
        raise BadCall(f"ids of moved blocks are int64 [2, n], not {call.ids.dtype} {list(call.ids.shape)}")
    return dict(call.ids.T.tolist())


def _step(owner: Owner, here: HostedModule) -> HostedStep:
    """The step that was begun, if its blocks are all there. Raises BadCall."""
    step = owner.step
    if step is None:
        raise BadCall("no step was begun")
    if step.end_block > here.kv.num_blocks:
        raise BadCall(f"the step uses block {step.end_block - 1}; the module has {here.kv.num_blocks} blocks")
    return step
