"""A tiny model, engines on it, who hears them, and the tokens that must come out, for the engine's tests."""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache

import torch
from random_model import random_model

from kernels.paged_attention.contract import AttentionBatch
from kernels.paged_attention.reference import ReferenceAttention
from libs.engine.core import EngineCore
from libs.engine.engine import Engine
from libs.engine.outputs import LayerOutput, SequenceFailed, StepOutput, TokenOutput
from libs.engine.settings import EngineSettings
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.placement.placement import Placement
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams

CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=60,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    eos_token_ids=(0,),
)
SIZE = 4
BLOCK_SHAPE = (CONFIG.num_kv_heads, 2, SIZE, CONFIG.head_dim)
BLOCK_BYTES = CONFIG.num_layers * math.prod(BLOCK_SHAPE) * 4
WAIT_SECONDS = 30.0


@cache
def tiny_model() -> Model:
    """Random weights, float32."""
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
    return random_model(CONFIG, seed=4, dtype=torch.float32)


def generation(
    prompt: list[int],
    name: str = "r",
    output: list[int] | None = None,
    deadline: float = math.inf,
    **sampling: object,
) -> Generation:
    asked = SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
    return Generation(name, pack_token_ids(prompt + (output or [])), len(prompt), asked, "g", deadline)


def engine(model: Model, **sizes: object) -> EngineCore:
    asked = {
        "max_model_len": 128,
        "num_blocks": 64,
        "block_size": SIZE,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
    }
    options = {key: sizes.pop(key) for key in ("clock", "attention", "on_layers") if key in sizes}
    return EngineCore(model, EngineSettings(**(asked | sizes)), **options)  # type: ignore[arg-type]


def prompt_of(length: int, kind: int = 0) -> list[int]:
    return [(7 * place + 13 * kind + place * place) % 59 + 1 for place in range(length)]


def begin(core: EngineCore, asked: Generation, **more: object) -> None:
    assert core.sequences.reserve(asked, asked.request_id, whole_prompt=True) is not None
    core.sequences.begin(asked.request_id, num_computed_tokens=0, **more)  # type: ignore[arg-type]


def drain(
    core: EngineCore, each: Callable[[StepOutput], None] = lambda _: None
) -> dict[str, list[TokenOutput]]:
    """Steps until there is nothing to do; the tokens of each sequence."""
    told: dict[str, list[TokenOutput]] = {}
    for _ in range(5000):
        step = core.step()
        each(step)
        for token in (*step.tokens, *step.prompts_done):
            told.setdefault(token.sequence_id, []).append(token)
        if step.is_idle:
            return told
    raise AssertionError("the engine does not come to rest")


def ids(tokens: Sequence[TokenOutput]) -> list[int]:
    return [token.token_id for token in tokens]


def alone(model: Model, asked: Generation) -> list[int]:
    """The engine with this sequence only, everything in one chunk, no cache."""
    core = engine(model, max_num_batched_tokens=512, prefix_cache=False)
    begin(core, asked)
    return ids(drain(core)[asked.request_id])


def kv_of(model: Model, prompt: list[int]) -> torch.Tensor:
    """KV of all blocks of a prompt, `[num_layers, n, *BLOCK_SHAPE]`; of the last one, what is filled."""
    outputs: list[LayerOutput] = []
    core = engine(model, on_layers=outputs.extend, max_num_batched_tokens=512)
    begin(core, generation(prompt), hand_over=True)
    drain(core)
    return torch.stack([output.blocks for output in outputs])


def dense(model: Model, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens by the whole sequence anew for each token, with torch's own attention."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        hidden = model.embed(torch.tensor(tokens))
        rotary = model.rotary(torch.arange(len(tokens)))
        for layer in range(CONFIG.num_layers):
            q, k, v = (x.transpose(0, 1)[None] for x in model.attention_inputs(layer, hidden, rotary))
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            hidden = model.attention_output(layer, hidden, attended[0].transpose(0, 1))
            hidden = model.mlp(layer, hidden)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def check_baseline(core: EngineCore) -> None:
    table = core.sequences
    assert table.allocator.num_used == 0
    assert not table.by_id
    assert not table.by_age
    assert table.rows.num_taken == 0
    assert core.budget.out_bytes == 0


def check_books(core: EngineCore) -> None:
    """Blocks, rows and ages fit the sequences that live."""
    table = core.sequences
    sequences = table.by_id.values()
    assert table.allocator.num_used == len({block for one in sequences for block in one.blocks})
    num_begun = sum(one.is_begun for one in sequences)
    assert table.rows.num_taken == len(table.by_age) == num_begun
    assert [one.arrival for one in table.by_age] == sorted(one.arrival for one in table.by_age)


class Listener:
    """Keeps what it hears; `until` waits for more."""

    def __init__(self) -> None:
        self.steps: list[Sequence[TokenOutput]] = []
        self.layers: list[LayerOutput] = []
        self.prompts: list[TokenOutput] = []
        self.failed: list[SequenceFailed] = []
        self.placements: list[tuple[Placement, str]] = []
        self.held_names: set[bytes] = set()
        self.heard = asyncio.Event()
        self.threads: set[int] = set()

    def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
        self.steps.append(tokens)
        self._note()

    def on_layer(self, output: LayerOutput) -> None:
        self.layers.append(output)
        self._note()

    def on_prompt_done(self, output: TokenOutput) -> None:
        self.prompts.append(output)
        self._note()

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        assert not self.held_names.intersection(stored)
        assert self.held_names.issuperset(removed)
        self.held_names = (self.held_names | set(stored)) - set(removed)
        self._note()

    def on_placement(self, placement: Placement, lost: str) -> None:
        self.placements.append((placement, lost))
        self._note()

    def on_failed(self, failure: SequenceFailed) -> None:
        self.failed.append(failure)
        self._note()

    def _note(self) -> None:
        self.threads.add(threading.get_ident())
        self.heard.set()

    def ids(self, name: str) -> list[int]:
        return ids([token for step in self.steps for token in step if token.sequence_id == name])

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                self.heard.clear()
                await self.heard.wait()


class GatedAttention(ReferenceAttention):
    """Stops before each layer until `gate` is open; `arrived` tells that a layer waits there."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.arrived = threading.Event()

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        self.arrived.set()
        if not self.gate.wait(WAIT_SECONDS):
            raise TimeoutError("nobody opened the gate")
        return super().attend(q, kv, batch, scale)


@asynccontextmanager
async def opened(
    model: Model, listener: Listener, *, hand_over_bytes: int = 256 << 20, **options: object
) -> AsyncGenerator[Engine]:
    """An engine of 120 blocks, closed at the end."""
    sizes = EngineSettings(
        max_model_len=400,
        num_blocks=120,
        block_size=SIZE,
        max_num_batched_tokens=64,
        hand_over_bytes=hand_over_bytes,
    )
    opening = Engine(model, sizes, **options)  # type: ignore[arg-type]  # options as Engine names them
    await opening.start(listener)
    try:
        yield opening
    finally:
        await opening.close()


async def reserve_and_begin(engine: Engine, asked: Generation, *, hand_over: bool = False) -> None:
    assert await engine.reserve(asked, whole_prompt=True) is not None
    await engine.begin(asked.request_id, num_computed_tokens=0, hand_over=hand_over)
