"""The same weights in `transformers`: the reference for the engine's rates."""

import time
from importlib import import_module
from typing import Any

import torch

from libs.model.load import find_model

CONTEXT_TOKENS = 128


def load_peer(model: str, dtype: torch.dtype) -> Any:
    """AutoModelForCausalLM from the GGUF or directory that kvmesh itself loads."""
    transformers: Any = import_module("transformers")  # a development dependency
    transformers.logging.set_verbosity_error()
    path = find_model(model)
    source, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options).eval()


@torch.inference_mode()
def decode_tokens_per_second(peer: Any, num_sequences: int, *, num_steps: int = 16) -> float:
    """Greedy decode steps over a cache of CONTEXT_TOKENS tokens."""
    tokens = torch.randint(0, peer.config.vocab_size, (num_sequences, CONTEXT_TOKENS))
    out = peer(tokens, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    last = out.logits[:, -1:].argmax(-1)
    begin = time.perf_counter()
    for step in range(num_steps + 2):
        if step == 2:
            begin = time.perf_counter()
        out = peer(last, past_key_values=cache, use_cache=True)
        last = out.logits[:, -1:].argmax(-1)
    return num_sequences * num_steps / (time.perf_counter() - begin)


@torch.inference_mode()
def prefill_tokens_per_second(peer: Any, num_tokens: int = 512, *, repeats: int = 4) -> float:
    """One prompt, logits of its last token only; the best of several runs."""
    tokens = torch.randint(0, peer.config.vocab_size, (1, num_tokens))
    best = float("inf")
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        peer(tokens, use_cache=True, logits_to_keep=1)
        best = min(best, time.perf_counter() - begin)
    return num_tokens / best
