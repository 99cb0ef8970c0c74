"""A host and what homes ask of it: tiny models, steps over a few sequences, and the same computed whole."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from random_model import random_model

from kernels.paged_attention.choose import choose_paged_attention
from kernels.paged_attention.contract import AttentionBatch
from libs.engine.attention import fitting_attention
from libs.engine.errors import NoRoom
from libs.engine.hosting.calls import BeginStep, HostedCall
from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.port import Answer
from libs.engine.memory.pool import BlockLayout, Pool
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model

torch.set_num_threads(1)  # tiny products: threads would only wait for each other
CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_BLOCKS = 24
"""Of a home."""


def config(num_heads: int, num_kv_heads: int, *, qk_norm: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture=Architecture.LLAMA,
        num_layers=4,
        hidden_size=48,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        intermediate_size=64,
        vocab_size=50,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        qk_norm=qk_norm,
    )


MODELS = {
    name: random_model(one, 7, torch.float32)
    for name, one in {
        "gqa": config(6, 3),
        "mha": config(3, 3),
        "qk_norm": config(4, 2, qk_norm=True),
    }.items()
}


@dataclass
class OwnBlocks:
    """The host's own sequences, as far as hosting sees them: blocks that are held."""

    pool: Pool
    held: set[int] = field(default_factory=set[int])
    min_free: int = 4

    def min_blocks(self) -> int:
        return max(self.min_free, len(self.held))

    def resize(self, num_blocks: int | None) -> None:
        if num_blocks is not None and num_blocks < self.min_blocks():
            raise NoRoom(f"{num_blocks} blocks are too few")
        told = self.pool.relayout(self.pool.layout, self.held, num_blocks=num_blocks)
        self.held = {told.moved.get(block, block) for block in self.held}


def layout_of(model: Model, slots: Sequence[tuple[int, int]]) -> BlockLayout:
    return BlockLayout(tuple(slots), BLOCK_SIZE, model.config.head_dim, model.dtype)


def all_slots(model: Model) -> list[tuple[int, int]]:
    return [(a, b) for a in range(model.config.num_layers) for b in range(model.config.num_kv_heads)]


class HostScene:
    """One host with a pool of `num_blocks` own blocks."""

    def __init__(self, model: Model, num_blocks: int = 200) -> None:
        self.model = model
        self.pool = Pool(layout_of(model, all_slots(model)), num_blocks, CPU)
        self.own = OwnBlocks(self.pool)
        self.modules = HostedModules(
            model,
            self.pool,
            lambda kv: fitting_attention(model, kv),
            min_own_blocks=self.own.min_blocks,
            resize_own=self.own.resize,
            worker="the-host",
        )

    def ask(self, call: HostedCall, guest: str = "home") -> torch.Tensor:
        """Runs everything asked so far. Raises HostLost."""
        answer = self.put(call, guest)
        self.modules.run_all()
        return answer.result()

    def put(self, call: HostedCall, guest: str = "home") -> Answer:
        answer = Answer(lambda: None)
        self.modules.put(guest, call, answer)
        return answer


class Home:
    """Some sequences of one model, computed whole. Each layer's inputs and outputs are kept."""

    def __init__(
        self, model: Model, block_tables: Sequence[Sequence[int]], num_blocks: int = NUM_BLOCKS
    ) -> None:
        self.model = model
        self.tables = np.array(block_tables, dtype=np.int32)
        self.lens = np.zeros(len(block_tables), dtype=np.int64)
        self.pool = Pool(layout_of(model, all_slots(model)), num_blocks, CPU)
        self.hidden: list[torch.Tensor] = []
        """Before each layer, and after the last."""
        self.qkv: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.attended: list[torch.Tensor] = []
        self._tokens = np.random.default_rng(3)
        self._attention = choose_paged_attention(model.device, model.dtype)

    def step(
        self, num_new: Sequence[int], before_layer: Callable[[int], None] = lambda layer: None
    ) -> BeginStep:
        """Computes so many new tokens of each sequence."""
        begun = self.begin(num_new)
        self.lens += np.array(num_new)
        model = self.model
        batch = AttentionBatch(
            torch.from_numpy(begun.block_tables),
            torch.from_numpy(begun.context_lens),
            torch.from_numpy(begun.query_starts),
            begun.max_query_len,
            begun.max_context_len,
        )
        ids = torch.from_numpy(self._tokens.integers(0, model.config.vocab_size, len(begun.slots)))
        rotary = model.rotary(torch.from_numpy(begun.positions))
        hidden = model.embed(ids)
        self.hidden, self.qkv, self.attended = [hidden], [], []
        for layer in range(model.config.num_layers):
            q, k, v = model.attention_inputs(layer, hidden, rotary)
            kv = self.pool.layer(layer)
            before_layer(layer)
            self._attention.write_kv(k, v, kv, torch.from_numpy(begun.slots))
            attended = self._attention.attend(q, kv, batch, 1 / math.sqrt(model.config.head_dim))
            hidden = model.mlp(layer, model.attention_output(layer, hidden, attended))
            self.hidden.append(hidden)
            self.qkv.append((q, k, v))
            self.attended.append(attended)
        return begun

    def begin(self, num_new: Sequence[int]) -> BeginStep:
        """The arrays of the next step."""
        new = np.array(num_new)
        running = np.flatnonzero(new)
        new = new[running]
        contexts = self.lens[running] + new
        positions = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(contexts, new, strict=True)]
        )
        rows = running.repeat(new)
        return BeginStep(
            positions=positions,
            slots=self.tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            + positions % BLOCK_SIZE,
            block_tables=self.tables[running],
            context_lens=contexts.astype(np.int32),
            query_starts=np.concatenate([[0], new.cumsum()]).astype(np.int32),
            max_query_len=int(new.max()),
            max_context_len=int(contexts.max()),
            last_tokens=None,
        )
