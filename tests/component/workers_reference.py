"""The tiny model that workers run in tests, and one engine alone: what the mesh's text must be."""

import asyncio
from collections.abc import Sequence

import torch
from random_model import random_model

from libs.engine.engine import Engine, EngineSettings
from libs.engine.outputs import LayerOutput, SequenceFailed, TokenOutput
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.request.generation import Generation

BLOCK_SIZE = 4
VOCAB_SIZE = 96
CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=VOCAB_SIZE,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    eos_token_ids=(0,),
)


def tiny_model() -> Model:
    return random_model(CONFIG, seed=7, dtype=torch.float32)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + num_tokens)
    return torch.randint(1, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


class _Alone:
    """Hears an engine that nobody shares with."""

    def __init__(self) -> None:
        self.tokens: list[TokenOutput] = []
        self.ended = asyncio.Event()

    def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
        self.tokens += tokens
        if tokens[-1].finish:
            self.ended.set()

    def on_layer(self, output: LayerOutput) -> None: ...

    def on_prompt_done(self, output: TokenOutput) -> None: ...

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None: ...

    def on_failed(self, failure: SequenceFailed) -> None:
        raise AssertionError(failure)


class Reference:
    """One engine, one sequence at a time: what the mesh's text must be."""

    def __init__(self) -> None:
        self._listener = _Alone()
        settings = EngineSettings(
            max_model_len=512, num_blocks=256, block_size=BLOCK_SIZE, num_threads=1, prefix_cache=False
        )
        self._engine = Engine(tiny_model(), settings)

    async def __aenter__(self) -> "Reference":
        await self._engine.start(self._listener)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.close()

    async def tokens(self, generation: Generation) -> list[TokenOutput]:
        self._listener.tokens.clear()
        self._listener.ended.clear()
        await self._engine.reserve(generation, whole_prompt=False)
        await self._engine.begin(generation.request_id, num_computed_tokens=0)
        await self._listener.ended.wait()
        return list(self._listener.tokens)
