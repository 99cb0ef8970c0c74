"""What each call of a home does to its modules here."""

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
from libs.engine.hosting.lent_context import lent_context
from libs.engine.hosting.owner import Guest, HostedModule
from libs.model.config import ModelConfig
from libs.placement.module import ModuleKind

Pieces = Generator[None, None, torch.Tensor]
"""A call that pauses between layers; returns its answer."""


class HostedCalls:
    """Checks a call and does it; `run` raises BadCall for what cannot be."""

    def __init__(
        self, config: ModelConfig, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._scale = 1 / math.sqrt(config.head_dim)

    def run(self, guest: Guest, call: HostedCall) -> Pieces:
        """Does the call, layer by layer; the answer is empty where the call has none."""
        match call:
            case BeginStep():
                guest.step = HostedStep(call, self._block_size, self._device)
            case RunLayers():
                return (yield from self._run_layers(guest, call))
            case Attend():
                return self._attend(guest, call)
            case AttendLent():
                return self._attend_lent(guest, call)
            case WriteBlocks():
                guest.any_module(call.move_id).kv.write(call.layer, call.blocks, call.kv)
            case ReadBlocks():
                return guest.any_module(call.move_id).kv.read(call.layer, call.blocks)
            case MoveBlocks():
                moved = _moved(call)
                for one in guest.modules.values():
                    if one.module.kind is not ModuleKind.TOKENS:  # those have ids of their own
                        one.kv.move(moved)
            case Settle():
                pass
        return torch.empty(0)

    def _run_layers(self, guest: Guest, call: RunLayers) -> Pieces:
        here = guest.module(call.move_id, ModuleKind.LAYERS)
        model, step = here.model, _step(guest, here)
        if model is None:
            raise BadCall(f"the module of move {call.move_id!r} has no weights")
        guest.busy_with = here
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

    def _attend(self, guest: Guest, call: Attend) -> torch.Tensor:
        here = guest.module(call.move_id, ModuleKind.HEADS)
        step, kv = _step(guest, here), here.kv.layer(call.layer)
        q, k, v = self._heads(call, step, kv.shape[1])
        here.attention.write_kv(k, v, kv, step.slots)
        return here.attention.attend(q, kv, step.batch, self._scale)

    def _attend_lent(self, guest: Guest, call: AttendLent) -> torch.Tensor:
        here = guest.module(call.move_id, ModuleKind.TOKENS)
        step, kv = guest.step, here.kv.layer(call.layer)
        if step is None:
            raise BadCall("no step was begun")
        q, k, v = self._heads(call, step, kv.shape[1])
        if here.lent is None or here.lent[:2] != (step, call.first_block):
            context = lent_context(
                step.begun, call.first_block, here.kv.num_blocks, here.kv.layout.block_size, kv.device
            )
            here.lent = (step, call.first_block, context)
        lent = here.lent[2]
        if len(lent.tokens):
            here.attention.write_kv(k[lent.tokens], v[lent.tokens], kv, lent.slots)
        attended, lse = here.attention.attend_with_lse(q, kv, lent.batch, self._scale)
        return torch.cat([attended.to(torch.float32), lse[..., None]], dim=-1)

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


def _step(guest: Guest, here: HostedModule) -> HostedStep:
    """The step that was begun, if its blocks are all there. Raises BadCall."""
    step = guest.step
    if step is None:
        raise BadCall("no step was begun")
    if step.end_block > here.kv.num_blocks:
        raise BadCall(f"the step uses block {step.end_block - 1}; the module has {here.kv.num_blocks} blocks")
    return step
