"""The engine alone, without services, network or event loop, against transformers and against the rates of
the machine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from libs.engine.core import EngineCore
from libs.engine.settings import EngineSettings
from libs.model.load import find_model, load_model
from libs.model.model import Model
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams
from tests.bench import transformers_peer
from tests.bench.figures import Figure, Say
from tests.bench.machine import MachineRates, measure_machine

MODEL = "smollm2-135m-instruct"
DECODE_AIMS = {1: 60.0, 8: 400.0, 32: 1000.0}
PREFILL_TOKENS, PREFILL_AIM = 512, 4300.0
_NO_DEADLINE = float("inf")


def measure_engine(say: Say) -> list[Figure]:
    """Decode of 1, 8 and 32 sequences and prefill of one prompt, in bf16."""
    say("rates of this machine")
    rates = measure_machine()
    model = load_model(find_model(MODEL), dtype=torch.bfloat16)
    say("the engine: decode at 1, 8 and 32 sequences, prefill of 512 tokens")
    ours = engine_rates(model)
    say("transformers: the same")
    peer = transformers_peer.load_peer(MODEL, torch.bfloat16)
    figures: list[Figure] = []
    for num_sequences, aim in DECODE_AIMS.items():
        theirs = transformers_peer.decode_tokens_per_second(peer, num_sequences)
        rate, name = ours.decode_tokens_per_second[num_sequences], f"decode, {num_sequences} sequences"
        figures.append(Figure(name, rate, "tokens/s", theirs, "transformers", at_least=aim))
        figures += _shares(model, name, rate / num_sequences, num_sequences, rates)
    rate = ours.prefill_tokens_per_second
    theirs = transformers_peer.prefill_tokens_per_second(peer, PREFILL_TOKENS)
    name = f"prefill, {PREFILL_TOKENS} tokens"
    flops_per_token = 2 * (_num_weights(model) - model.config.vocab_size * model.config.hidden_size)
    return [
        *figures,
        Figure(name, rate, "tokens/s", theirs, "transformers", at_least=PREFILL_AIM),
        _gemm(name, rate * flops_per_token, rates),
    ]


def _shares(
    model: Model, name: str, steps_per_second: float, num_sequences: int, rates: MachineRates
) -> list[Figure]:
    """A decode step reads every weight once and multiplies each with every sequence."""
    weights_per_second = steps_per_second * _num_weights(model)
    read, copied = 2 * weights_per_second / 1e9, rates.copy_bytes_per_second / 1e9
    return [
        Figure(f"{name}: weights read", read, "GB/s", copied, "copy"),
        _gemm(name, 2 * num_sequences * weights_per_second, rates),
    ]


def _gemm(name: str, flops_per_second: float, rates: MachineRates) -> Figure:
    reference = rates.gemm_flops_per_second / 1e9
    return Figure(f"{name}: GEMM work", flops_per_second / 1e9, "GFLOP/s", reference, "torch bf16 GEMM")


def _num_weights(model: Model) -> int:
    """Weights that a decode step reads: the layers' matrices and the head."""
    c = model.config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = 3 * c.hidden_size * c.intermediate_size
    return c.num_layers * (attention + mlp) + c.vocab_size * c.hidden_size


@dataclass(frozen=True)
class EngineRates:
    """Tokens per second: decode by number of sequences, and prefill of one prompt alone."""

    decode_tokens_per_second: dict[int, float]
    prefill_tokens_per_second: float


def engine_rates(
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
        core.sequences.abort(str(index))
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
    if core.sequences.reserve(generation, sequence_id, whole_prompt=True) is None:
        raise RuntimeError(f"the pool of the measurement is too small for {sequence_id}")
    core.sequences.begin(sequence_id, num_computed_tokens=0)
