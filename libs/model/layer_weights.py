"""The weights of a layer as plain tensors, to travel to another worker, and a layer made of them again.

A name is that of the `Layer`'s part, with `.weight` and `.bias` for products: `qkv.weight`, `mlp_norm`.
"""

import math
from collections.abc import Mapping
from dataclasses import fields

import torch

from kernels.linear.choose import pack_gated_linear, pack_linear
from libs.model.config import ModelConfig
from libs.model.errors import WrongLayers
from libs.model.layer import Layer


def layer_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of one layer, in the order that both sides of a way agree on."""
    hidden, ff = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attention_norm": (hidden,)}
    shapes |= _product("qkv", qkv_rows, hidden, config.attention_bias)
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    shapes |= _product("attention_output", hidden, q_rows, config.attention_output_bias)
    shapes["mlp_norm"] = (hidden,)
    shapes |= _product("gate_up", 2 * ff, hidden, config.mlp_bias)
    return shapes | _product("down", hidden, ff, config.mlp_bias)


def layer_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one layer's plain tensors, without what packing adds (that is `layer_bytes`)."""
    return dtype.itemsize * sum(math.prod(shape) for shape in layer_tensor_shapes(config).values())


def layer_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """All weights of a layer, unpacked and contiguous, on its device and in its dtype, in the order of
    `layer_tensor_shapes`.

    They may share the layer's memory: read them only. A layer unpacked takes its size once more.
    """
    tensors: dict[str, torch.Tensor | None] = {}
    for field in fields(layer):
        part = getattr(layer, field.name)
        if part is None or isinstance(part, torch.Tensor):
            tensors[field.name] = part
        else:
            tensors |= {f"{field.name}.weight": part.weight, f"{field.name}.bias": part.bias}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def layer_of(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
) -> Layer:
    """The layer that `layer_tensors` was given; it holds none of the tensors' memory.

    Raises:
        WrongLayers: a tensor is missing, is none of this model's, or has another shape or dtype.
    """
    shapes = layer_tensor_shapes(config)
    _check(shapes, tensors, dtype)

    def own(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=dtype, device=device).copy_(tensors[name])

    def own_if_any(name: str) -> torch.Tensor | None:
        return own(name) if name in shapes else None

    return Layer(
        attention_norm=own("attention_norm"),
        qkv=pack_linear(own("qkv.weight"), own_if_any("qkv.bias")),
        q_norm=own_if_any("q_norm"),
        k_norm=own_if_any("k_norm"),
        attention_output=pack_linear(own("attention_output.weight"), own_if_any("attention_output.bias")),
        mlp_norm=own("mlp_norm"),
        gate_up=pack_gated_linear(own("gate_up.weight"), own_if_any("gate_up.bias")),
        down=pack_linear(own("down.weight"), own_if_any("down.bias")),
    )


def _product(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if has_bias else {})


def _check(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    if missing := [name for name in shapes if name not in tensors]:
        raise WrongLayers(f"a layer of this model needs tensor {missing[0]}, which did not come")
    if unknown := [name for name in tensors if name not in shapes]:
        raise WrongLayers(f"tensor {unknown[0]} is none of a layer of this model, which has {list(shapes)}")
    for name, shape in shapes.items():
        came = tensors[name]
        if tuple(came.shape) != shape or came.dtype != dtype:
            raise WrongLayers(
                f"tensor {name} came as {came.dtype} {list(came.shape)} where this model has {dtype} "
                f"{list(shape)}; both workers must serve the same model in the same dtype"
            )
