"""How fast the engine is alone, without services, network or event loop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libs.engine.core import EngineCore
from libs.engine.settings import EngineSettings
from libs.model.model import Model
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams

_NO_DEADLINE = float("inf")


@dataclass(frozen=True)
class EngineRates:
    """Tokens per second: decode by number of sequences, and prefill of one prompt alone."""

    decode_tokens_per_second: dict[int, float]
    prefill_tokens_per_second: float


def measure_engine(
    model: Model,
    *,
    num_seqs: Sequence[int] = (1, 8, 32),
    num_context_tokens: int = 128,
    num_prompt_tokens: int = 512,
    num_steps: int = 32,
    num_repeats: int = 3,
    block_size: int = 16,
) -> EngineRates:
    """Greedy decode at a context around `num_context_tokens`, and prefill; the best of `num_repeats` each.

    torch's thread count is the caller's to set.
    """
    length = max(num_context_tokens + num_steps, num_prompt_tokens) + 2
    settings = EngineSettings(
        max_model_len=length,
        num_blocks=max(num_seqs) * (length // block_size + 2),
        block_size=block_size,
        max_num_batched_tokens=max(2048, num_prompt_tokens),
        prefix_cache=False,
    )
    core = EngineCore(model, settings)
    decode = {
        count: max(_decode_rate(core, count, num_context_tokens, num_steps) for _ in range(num_repeats))
        for count in num_seqs
    }
    return EngineRates(decode, max(_prefill_rate(core, num_prompt_tokens) for _ in range(num_repeats)))


def _decode_rate(core: EngineCore, count: int, num_context_tokens: int, num_steps: int) -> float:
    num_prompt_tokens = max(1, num_context_tokens - num_steps // 2)
    for index in range(count):
        _begin(core, str(index), num_prompt_tokens, max_tokens=num_steps + 2)
    while core.load().num_waiting_tokens:
        core.step()
    core.step()
    begin = time.perf_counter()
    for _ in range(num_steps - 1):
        core.step()
    seconds = time.perf_counter() - begin
    for index in range(count):
        core.abort(str(index))
    return count * (num_steps - 1) / seconds


def _prefill_rate(core: EngineCore, num_prompt_tokens: int) -> float:
    _begin(core, "prompt", num_prompt_tokens, max_tokens=1)
    begin = time.perf_counter()
    while not core.step().is_idle:
        pass
    return num_prompt_tokens / (time.perf_counter() - begin)


def _begin(core: EngineCore, sequence_id: str, num_prompt_tokens: int, *, max_tokens: int) -> None:
    drawn = np.random.default_rng(len(sequence_id)).integers(
        0, core.model.config.vocab_size, num_prompt_tokens
    )
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    generation = Generation(
        sequence_id,
        pack_token_ids(drawn),
        num_prompt_tokens,
        sampling,
        "",
        deadline_unix_seconds=_NO_DEADLINE,
    )
    if core.reserve(generation, sequence_id, whole_prompt=True) is None:
        raise RuntimeError(f"the pool of the measurement is too small for {sequence_id}")
    core.begin(sequence_id, num_computed_tokens=0)
