"""A tiny random Llama with SmolLM2's tokenizer, as a Hugging Face directory: what most test meshes serve.

What it must say is computed from the same weights, so it proves what a trained model would, in less time.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from random_model import tensor_shapes
from safetensors.torch import save_file

from libs.model.gguf_file import read_gguf
from libs.model.gguf_tokenizer import build_gguf_tokenizer
from libs.model.hf_config import read_hf_config
from libs.model.source import DEFAULT_MODEL, find_model

NAME = "tiny"
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 8, 3, 16
BLOCK_BYTES = NUM_LAYERS * NUM_KV_HEADS * 2 * 16 * HEAD_DIM * 4
"""In float32: layers, KV heads, K and V, tokens, head size, bytes."""
SEED = 1
SCALES = {"q_proj": 3.0, "o_proj": 2.0}
"""Attention that looks at few tokens and weighs as much as they do: answers depend on all of a prompt."""
NUM_WORDS, LOUD, QUIET = 128, 4.0, 0.1
"""Only so many tokens are ever said: the fewer, the farther is the best from the second best."""


def write_tiny_model(directory: Path) -> Path:
    """Writes config, weights and tokenizer; returns the directory."""
    metadata = read_gguf(find_model(DEFAULT_MODEL)).metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    words = [i for i, token in enumerate(tokens) if re.fullmatch("Ġ[a-z]{4,}", token)]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 192,
        "vocab_size": len(tokens),
        "max_position_embeddings": 8192,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    template = {"chat_template": metadata["tokenizer.chat_template"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(template))
    build_gguf_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    generator = torch.Generator().manual_seed(SEED)
    shapes = tensor_shapes(read_hf_config(directory))
    weights = {name: _weight(name, shape, generator) for name, shape in shapes.items()}
    loudness = torch.full((config["vocab_size"], 1), QUIET)
    loudness[words[:NUM_WORDS]] = LOUD
    weights["lm_head.weight"] *= loudness
    save_file(weights, directory / "model.safetensors")
    return directory


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    part = name.split(".")[-2]
    return values * SCALES.get(part, 1.0) / math.sqrt(shape[-1])
