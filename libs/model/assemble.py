"""From named tensors to the packed weights that a model computes with."""

from collections.abc import Callable, Iterator, Sequence

import torch

from kernels.linear.choose import pack_gated_linear, pack_linear
from kernels.linear.contract import GatedLinear, Linear
from libs.model.checkpoint import Checkpoint
from libs.model.config import ModelConfig
from libs.model.errors import BrokenModel
from libs.model.layer import Layer
from libs.model.model import Weights

OnProgress = Callable[[float], None]
_NOT_WEIGHTS = (".rotary_emb.inv_freq",)  # old Llama checkpoints store it; it follows from the config


class _Assembly:
    """Takes each tensor once, checks its shape, converts it, and tells how far it is."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: OnProgress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.on_progress = on_progress
        self.left = dict(checkpoint.spans)
        self.total_bytes = max(1, sum(span.num_bytes for span in self.left.values()))
        self.done_bytes = 0

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor in a memory of its own."""
        result = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._copy(name, result)
        return result

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool) -> Linear:
        """One product from the projections `names`, packed by rows."""
        return pack_linear(*self._packed(names, rows, columns, bias))

    def gated(self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool) -> GatedLinear:
        """Gate and up as one product with the gate applied."""
        return pack_gated_linear(*self._packed(names, rows, columns, bias))

    def _packed(
        self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of several projections below each other, none of them held twice."""
        weight = self._stacked([f"{name}.weight" for name in names], rows, columns)
        return weight, self._stacked([f"{name}.bias" for name in names], rows) if bias else None

    def _stacked(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> torch.Tensor:
        result = torch.empty((sum(rows), *columns), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(result, list(rows)), strict=True):
            self._copy(name, part)
        return result

    def _copy(self, name: str, target: torch.Tensor) -> None:
        span = self.left.pop(name, None)
        if span is None:
            raise BrokenModel(
                f"the weights lack tensor {name}, which the config asks for; download the model again"
            )
        if span.shape != tuple(target.shape):
            raise BrokenModel(
                f"tensor {name} has shape {list(span.shape)} where the config asks for {list(target.shape)}; "
                "config and weights are not of the same model"
            )
        target.copy_(self.checkpoint.read(name))
        self.done_bytes += span.num_bytes
        if self.on_progress is not None:
            self.on_progress(self.done_bytes / self.total_bytes)


def assemble(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress | None = None,
) -> Weights:
    """All weights in `dtype` on `device`; holds one tensor of the checkpoint beside the model at a time.

    `on_progress` gets the fraction done, rising to 1.

    Raises:
        BrokenModel: a tensor is missing, has another shape, or belongs to nothing the config describes.
    """
    assembly = _Assembly(checkpoint, dtype, device, on_progress)
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = assembly.tensor("model.embed_tokens.weight", *vocabulary)
    layers = {index: _layer(config, assembly, index) for index in range(config.num_layers)}
    final_norm = assembly.tensor("model.norm.weight", config.hidden_size)
    if config.tie_word_embeddings:
        assembly.left.pop("lm_head.weight", None)
        head = pack_linear(embedding)
    else:
        head = pack_linear(assembly.tensor("lm_head.weight", *vocabulary))
    left_over = [name for name in assembly.left if not name.endswith(_NOT_WEIGHTS)]
    if left_over:
        raise BrokenModel(
            f"the weights hold {len(left_over)} tensors that the config does not explain, such as "
            f"{left_over[0]}; config and weights are not of the same model"
        )
    if on_progress is not None:
        on_progress(1.0)
    return Weights(None if config.tie_word_embeddings else embedding, layers, final_norm, head)


def assemble_layers(
    config: ModelConfig,
    checkpoint: Checkpoint,
    layers: range,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Layer]]:
    """Some layers as `assemble` gives them, one by one with their numbers; nothing else is read.

    Raises:
        BrokenModel: a tensor is missing or has another shape.
    """
    assembly = _Assembly(checkpoint, dtype, device, on_progress=None)
    return ((index, _layer(config, assembly, index)) for index in layers)


def _layer(config: ModelConfig, assembly: _Assembly, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    hidden, attention = config.hidden_size, f"{prefix}.self_attn"
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return Layer(
        attention_norm=assembly.tensor(f"{prefix}.input_layernorm.weight", hidden),
        qkv=assembly.linear(
            [f"{attention}.{part}_proj" for part in "qkv"],
            [q_rows, kv_rows, kv_rows],
            hidden,
            bias=config.attention_bias,
        ),
        q_norm=assembly.tensor(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=assembly.tensor(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        attention_output=assembly.linear(
            [f"{attention}.o_proj"], [hidden], q_rows, bias=config.attention_output_bias
        ),
        mlp_norm=assembly.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=assembly.gated(
            [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
            [config.intermediate_size] * 2,
            hidden,
            bias=config.mlp_bias,
        ),
        down=assembly.linear(
            [f"{prefix}.mlp.down_proj"], [hidden], config.intermediate_size, bias=config.mlp_bias
        ),
    )
