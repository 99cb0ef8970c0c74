"""Models with random weights, for tests and measurements that need shapes and not sense."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from libs.model.assemble import assemble, assemble_layers
from libs.model.checkpoint import TensorSpan
from libs.model.config import ModelConfig
from libs.model.fingerprint import config_digest
from libs.model.layer import Layer
from libs.model.model import Model


class _RandomCheckpoint:
    """Tensors drawn in a fixed order from one seed, as a checkpoint of that config would hold them."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._spans = {
            name: TensorSpan(Path(), 0, 1, "F32", shape) for name, shape in tensor_shapes(config).items()
        }

    @property
    def spans(self) -> Mapping[str, TensorSpan]:
        return self._spans

    def read(self, name: str) -> torch.Tensor:
        shape = self._spans[name].shape
        values = torch.randn(shape, generator=self._generator)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * values
        return values / math.sqrt(shape[-1])


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of all tensors that a config asks for."""
    d, ff, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    linears = {
        "self_attn.q_proj": (q, d, config.attention_bias),
        "self_attn.k_proj": (kv, d, config.attention_bias),
        "self_attn.v_proj": (kv, d, config.attention_bias),
        "self_attn.o_proj": (d, q, config.attention_output_bias),
        "mlp.gate_proj": (ff, d, config.mlp_bias),
        "mlp.up_proj": (ff, d, config.mlp_bias),
        "mlp.down_proj": (d, ff, config.mlp_bias),
    }
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    norms |= {"self_attn.q_norm": hd, "self_attn.k_norm": hd} if config.qk_norm else {}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for part, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{part}.weight"] = (rows, columns)
            shapes |= {f"{prefix}.{part}.bias": (rows,)} if bias else {}
        shapes |= {f"{prefix}.{part}.weight": (size,) for part, size in norms.items()}
    shapes["model.norm.weight"] = (d,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": (config.vocab_size, d)}


class _RandomLayers:
    """Draws everything before a layer again: it takes as long as making the model."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype) -> None:
        self._config = config
        self._seed = seed
        self._dtype = dtype

    def read_layers(self, layers: range) -> dict[int, Layer]:
        checkpoint = _RandomCheckpoint(self._config, self._seed)
        checkpoint.read("model.embed_tokens.weight")  # it is drawn first
        drawn = range(max(layers, default=-1) + 1)
        found = assemble_layers(
            self._config, checkpoint, drawn, dtype=self._dtype, device=torch.device("cpu")
        )
        return {index: layer for index, layer in found if index in layers}


def random_model(config: ModelConfig, seed: int, dtype: torch.dtype) -> Model:
    """A model on the CPU whose weights follow from `seed`; its fingerprint does too."""
    config.check()
    weights = assemble(config, _RandomCheckpoint(config, seed), dtype=dtype, device=torch.device("cpu"))
    digest = config_digest(config, str(dtype).removeprefix("torch."))
    digest.update(f"random {seed}".encode())
    source = _RandomLayers(config, seed, dtype)
    return Model(config, weights, fingerprint=digest.hexdigest(length=16), read_layers=source.read_layers)
