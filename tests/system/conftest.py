"""Meshes and the single-process reference that the system tests share."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from black_box import MODEL, Mesh, running_mesh
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One prefill and one decode worker in float32, with chunks small enough that long prompts are cut."""
    flags = ["--dtype", "float32", "--max-num-batched-tokens", "256", "--num-blocks", "1024"]
    yield from running_mesh(tmp_path_factory.mktemp("mesh"), *flags)


@pytest.fixture(scope="session")
def double_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers per role, so that one of each may die."""
    flags = ["--dtype", "float32", "--prefill", "2", "--decode", "2", "--num-blocks", "512"]
    yield from running_mesh(tmp_path_factory.mktemp("double"), *flags)


class _Collector:
    """Gathers what an engine generates, until all of `num_sequences` have ended."""

    def __init__(self, num_sequences: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self.num_open = num_sequences
        self.all_ended = asyncio.Event()

    def on_tokens(self, tokens: Sequence[object]) -> None:
        for token in tokens:
            self.token_ids[int(token.sequence_id)].append(token.token_id)  # type: ignore[attr-defined]
            if token.finish is not None:  # type: ignore[attr-defined]
                self.num_open -= 1
        if not self.num_open:
            self.all_ended.set()

    def on_layer(self, output: object) -> None:
        raise AssertionError("nothing is handed over in a single process")

    def on_prompt_done(self, output: object) -> None:
        raise AssertionError("nothing is handed over in a single process")

    def on_names(self, stored: object, removed: object) -> None: ...

    def on_failed(self, failure: object) -> None:
        raise AssertionError(f"the reference failed: {failure}")


@pytest.fixture(scope="session")
def reference() -> Callable[[list[str], int], list[str]]:
    """Greedy texts of prompts from one engine of role `both` in this process, in float32."""
    import torch

    from libs.engine.engine import Engine
    from libs.engine.settings import EngineSettings
    from libs.model.load import find_model, load_model
    from libs.model.tokenizer import load_tokenizer

    source = find_model(MODEL)
    model, tokenizer = load_model(source, dtype=torch.float32), load_tokenizer(source)

    async def generate(prompts: list[str], max_tokens: int) -> list[str]:
        collector = _Collector(len(prompts))
        settings = EngineSettings(
            num_blocks=1600, max_num_batched_tokens=2048, max_model_len=2048, num_threads=2
        )
        engine = Engine(model, settings)
        await engine.start(collector)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            token_ids = tokenizer.encode(prompt)
            generation = Generation(str(i), pack_token_ids(token_ids), len(token_ids), sampling, "", 2e9)
            assert await engine.reserve(generation, whole_prompt=True) is not None
            await engine.begin(str(i), num_computed_tokens=0)
        await collector.all_ended.wait()
        await engine.close()
        return [tokenizer.decode(token_ids) for token_ids in collector.token_ids]

    return lambda prompts, max_tokens: asyncio.run(generate(prompts, max_tokens))
