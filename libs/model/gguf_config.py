"""Metadata of a GGUF file as a `ModelConfig`; what is not computed is refused by name."""

from typing import Any

import numpy as np

from libs.model.config import Architecture, FrequencyRope, LinearRope, ModelConfig, RopeScaling
from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.gguf_file import GgufFile

_ARCHITECTURES = {"llama": Architecture.LLAMA, "qwen2": Architecture.QWEN2, "qwen3": Architecture.QWEN3}
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")


def gguf_config(file: GgufFile) -> ModelConfig:
    """The config that a file's metadata and tensor names tell.

    Raises:
        BrokenModel: keys are missing.
        UnsupportedModel: another architecture, experts, partial rotation, other rope scaling.
    """
    if file.architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {file.architecture!r} is not supported; supported are "
            + ", ".join(_ARCHITECTURES)
        )
    architecture = _ARCHITECTURES[file.architecture]
    if file.get("expert_count", 0):
        raise UnsupportedModel(f"a mixture of {file.get('expert_count')} experts is not supported")
    num_heads, hidden_size = _integer(file, "attention.head_count"), _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", hidden_size // max(num_heads, 1))
    _refuse_odd_heads(file, head_dim)
    config = ModelConfig(
        architecture=architecture,
        num_layers=_integer(file, "block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_integer(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_integer(file, "feed_forward_length"),
        vocab_size=_vocab_size(file),
        rms_norm_eps=_real(file, "attention.layer_norm_rms_epsilon"),
        rope_theta=float(file.get("rope.freq_base", 10000.0)),
        max_position_embeddings=_integer(file, "context_length"),
        rope_scaling=_rope_scaling(file),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_token_ids=gguf_eos_token_ids(file.metadata),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        sliding_window=file.get("attention.sliding_window"),
    )
    config.check()
    return config


def gguf_eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ends of text and of a turn; older files name only one, so well-known control tokens count as well."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    known = [tokens.index(token) for token in _ENDS_OF_TURN if token in tokens]
    return tuple(dict.fromkeys(number for number in [*named, *known] if number is not None))


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, list):
        raise UnsupportedModel(f"{file.architecture}.{key} differs between layers, which is not supported")
    if not isinstance(value, int):
        raise BrokenModel(
            f"{file.path.name}: metadata {file.architecture}.{key} is {value!r}; an integer is needed"
        )
    return value


def _real(file: GgufFile, key: str) -> float:
    value = file.get(key)
    if not isinstance(value, float):
        raise BrokenModel(
            f"{file.path.name}: metadata {file.architecture}.{key} is {value!r}; a number is needed"
        )
    return value


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: metadata may be absent, or count without padding."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise BrokenModel(f"{file.path.name} lacks tensor token_embd.weight; it holds no whole model")
    return embedding.shape[0]


def _refuse_odd_heads(file: GgufFile, head_dim: int) -> None:
    value_length = _integer(file, "attention.value_length", head_dim)
    if value_length != head_dim:
        raise UnsupportedModel(
            f"value heads of {value_length} beside key heads of {head_dim} are not supported"
        )
    rotated = _integer(file, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(f"rotating {rotated} of {head_dim} dimensions is not supported")


def _rope_scaling(file: GgufFile) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:
        place = file.tensors["rope_freqs.weight"]
        divisors = np.memmap(file.path, np.float32, "r", place.start, place.shape)
        return FrequencyRope(tuple(float(divisor) for divisor in divisors))
    kind, factor = file.get("rope.scaling.type", "none"), float(file.get("rope.scaling.factor", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return LinearRope(factor)
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported are linear and llama3")
