"""Models from GGUF files: names, order of rows, quantised numbers, rope, refusals."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dense_reference import prompt_logits
from gguf_names import GGUF_NAMES
from random_model import tensor_shapes

from libs.model.assemble import assemble
from libs.model.checkpoint import TensorSpan
from libs.model.config import Architecture, LinearRope, Llama3Rope, ModelConfig
from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.gguf_checkpoint import GgufCheckpoint
from libs.model.gguf_config import gguf_config
from libs.model.gguf_file import read_gguf
from libs.model.load import load_model
from libs.model.model import Model
from libs.model.rotary import inverse_frequencies

CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=200,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
)
TOKENS = list(range(5, 45))


def weights(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = tensor_shapes(config)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What llama.cpp's conversion does to q and k of Llama models."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def save_gguf(
    path: Path,
    config: ModelConfig,
    kind: gguf.GGMLQuantizationType,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The weights as llama.cpp's conversion writes them: matrices in `kind`, the rest in float32."""
    arch = "llama" if config.architecture is Architecture.MISTRAL else config.architecture.value
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for name, tensor in weights(config).items():
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        if arch == "llama" and ("attn_q." in name or "attn_k." in name):
            tensor = interleave(tensor, config.num_heads if "attn_q." in name else config.num_kv_heads)
        wanted = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), wanted), raw_dtype=wanted)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class InMemory:
    """A checkpoint that holds its tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.spans = {
            name: TensorSpan(Path(), 0, 1, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def exact_model(config: ModelConfig) -> Model:
    checkpoint = InMemory(weights(config))
    assembled = assemble(config, checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    return Model(config, assembled, fingerprint="")


@pytest.mark.parametrize(
    ("kind", "error"), [("F32", 1e-6), ("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_1", 0.1)]
)
def test_a_gguf_gives_the_tensors_that_were_written(kind: str, error: float, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", CONFIG, gguf.GGMLQuantizationType[kind])
    file = read_gguf(path)
    checkpoint = GgufCheckpoint(file, gguf_config(file))
    expected = weights()
    assert set(checkpoint.spans) == set(expected)
    for name, tensor in expected.items():
        read = checkpoint.read(name)
        assert read.shape == tensor.shape
        assert (read - tensor).abs().max() <= error, name


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (Architecture.LLAMA, {}),
        (Architecture.LLAMA, {"attention_bias": True, "tie_word_embeddings": True}),
        (Architecture.QWEN2, {"attention_bias": True}),
        (Architecture.QWEN3, {"qk_norm": True, "head_dim": 32}),
    ],
)
def test_a_gguf_computes_what_its_weights_compute(
    architecture: Architecture, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = ModelConfig(**(CONFIG.__dict__ | {"architecture": architecture} | changes))
    path = save_gguf(tmp_path / "model.gguf", config, gguf.GGMLQuantizationType.F32)
    model = load_model(path, dtype=torch.float32)
    read = model.config
    assert (read.qk_norm, read.attention_bias, read.tie_word_embeddings) == (
        config.qk_norm,
        config.attention_bias,
        config.tie_word_embeddings,
    )
    expected = prompt_logits(exact_model(config), TOKENS)
    torch.testing.assert_close(prompt_logits(model, TOKENS), expected, atol=1e-5, rtol=1e-5)


def test_rope_scaling_stored_as_divisors_equals_llama_3s(tmp_path: Path) -> None:
    rope = Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    scaled = ModelConfig(**(CONFIG.__dict__ | {"rope_scaling": rope}))
    divisors = inverse_frequencies(CONFIG) / inverse_frequencies(scaled)
    extra = {"rope_freqs.weight": divisors.numpy()}
    path = save_gguf(tmp_path / "model.gguf", CONFIG, gguf.GGMLQuantizationType.F32, extra)
    expected = prompt_logits(exact_model(scaled), TOKENS)
    model = load_model(path, dtype=torch.float32)
    torch.testing.assert_close(prompt_logits(model, TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_quantised_models_of_the_same_weights_have_different_fingerprints(tmp_path: Path) -> None:
    kinds = (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0)
    paths = [save_gguf(tmp_path / f"{kind.name}.gguf", CONFIG, kind) for kind in kinds]
    assert len({load_model(path, dtype=torch.float32).fingerprint for path in paths}) == 2


def test_tensors_that_the_config_does_not_explain_are_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 4), np.float32)}
    path = save_gguf(tmp_path / "model.gguf", CONFIG, gguf.GGMLQuantizationType.F32, extra)
    with pytest.raises(BrokenModel, match=r"blk\.0\.ffn_gate_exps\.weight"):
        load_model(path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("llama.expert_count", 8, "mixture of 8 experts"),
        ("llama.rope.dimension_count", 8, "rotating 8 of 16 dimensions"),
        ("llama.attention.value_length", 32, "value heads of 32 beside key heads of 16"),
        ("llama.attention.head_count_kv", [2, 4], "differs between layers"),
        ("general.architecture", "gemma3", "architecture 'gemma3' is not supported; supported are llama"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    key: str, value: object, complaint: str, tmp_path: Path
) -> None:
    file = read_gguf(save_gguf(tmp_path / "model.gguf", CONFIG, gguf.GGMLQuantizationType.F16))
    file.metadata[key] = value
    with pytest.raises(UnsupportedModel, match=complaint):
        gguf_config(file)


def test_yarn_scaling_is_refused_and_linear_is_taken(tmp_path: Path) -> None:
    file = read_gguf(save_gguf(tmp_path / "model.gguf", CONFIG, gguf.GGMLQuantizationType.F16))
    file.metadata.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert gguf_config(file).rope_scaling == LinearRope(4.0)
    file.metadata["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(UnsupportedModel, match="'yarn'"):
        gguf_config(file)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.layer_norm_rms_epsilon"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    file = read_gguf(save_gguf(tmp_path / "model.gguf", CONFIG, gguf.GGMLQuantizationType.F16))
    del file.metadata[key]
    with pytest.raises(BrokenModel, match=key):
        gguf_config(file)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> np.ndarray:
        raise NotImplementedError

    path = save_gguf(tmp_path / "model.gguf", CONFIG, gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr("libs.model.gguf_checkpoint.dequantize", refuse)
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight is of type Q8_0"):
        load_model(path, dtype=torch.float32)
