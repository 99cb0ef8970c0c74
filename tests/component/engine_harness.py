"""A tiny model, an engine on it, and the tokens that must come out, for the tests of the engine's core."""

import math
from collections.abc import Callable

import torch

from libs.engine.engine_core import EngineCore, StepOutput
from libs.engine.outputs import TokenOutput
from libs.engine.settings import EngineSettings
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.model.random_model import random_model
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


def tiny_model() -> Model:
    """Random weights, float32; the same at every call."""
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
    assert core.reserve(asked, asked.request_id, whole_prompt=True) is not None
    core.begin(asked.request_id, num_computed_tokens=0, **more)  # type: ignore[arg-type]


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


def ids(tokens: list[TokenOutput]) -> list[int]:
    return [token.token_id for token in tokens]


def alone(model: Model, asked: Generation) -> list[int]:
    """The engine with this sequence only, everything in one chunk, no cache."""
    core = engine(model, max_num_batched_tokens=512, prefix_cache=False)
    begin(core, asked)
    return ids(drain(core)[asked.request_id])


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
    ledger = core.ledger
    assert ledger.allocator.num_used == 0
    assert not ledger.sequences
    assert not ledger.by_age
    assert ledger.rows.num_taken == 0
