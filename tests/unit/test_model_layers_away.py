"""Layers that leave a model and come back: shared weights, freed memory, exact bits."""

import gc
import mmap
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_reference import prompt_logits
from random_model import random_model

from libs.model.config import Architecture, ModelConfig
from libs.model.errors import LayerAway, SourceChanged, WrongLayers
from libs.model.layer import Layer, layer_bytes
from libs.model.layer_files import give_back_freed_memory
from libs.model.layer_weights import layer_of, layer_tensor_shapes, layer_tensors, layer_weight_bytes
from libs.model.model import Model

LLAMA = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=4,
    hidden_size=72,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=88,
    vocab_size=200,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
)
CONFIGS = {
    "llama": LLAMA,
    "mha": replace(LLAMA, num_kv_heads=6),
    "odd sizes": replace(LLAMA, hidden_size=71, intermediate_size=33),
    "tied": replace(LLAMA, tie_word_embeddings=True),
    "qwen2": replace(LLAMA, architecture=Architecture.QWEN2, attention_bias=True),
    "qwen3": replace(LLAMA, architecture=Architecture.QWEN3, qk_norm=True),
    "all biases": replace(LLAMA, attention_bias=True, attention_output_bias=True, mlp_bias=True),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = list(range(5, 45))
AWAY = range(1, 3)


@pytest.fixture
def model() -> Model:
    return random_model(LLAMA, 1, torch.float32)


def tensors_of(layer: Layer) -> list[torch.Tensor]:
    """All tensors in a layer, also those inside products."""
    parts = [getattr(layer, field.name) for field in fields(layer)]
    held = [part if isinstance(part, torch.Tensor) else vars(part) for part in parts if part is not None]
    inner = [value for one in held if isinstance(one, dict) for value in one.values()]
    return [one for one in (*held, *inner) if isinstance(one, torch.Tensor)]


def same_bits(one: Layer, other: Layer) -> bool:
    mine, theirs = layer_tensors(one), layer_tensors(other)
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


# Leaving


def test_a_model_without_layers_shares_everything_else(model: Model) -> None:
    rest = model.without_layers(AWAY)
    assert rest.fingerprint == model.fingerprint
    assert (rest.config, rest.dtype, rest.device) == (model.config, model.dtype, model.device)
    assert sorted(rest.weights.layers) == [0, 3]
    assert all(rest.layer(index) is model.layer(index) for index in (0, 3))
    for name in ("embedding", "final_norm", "head"):
        assert getattr(rest.weights, name) is getattr(model.weights, name)


def test_the_model_it_was_made_from_stays_whole(model: Model) -> None:
    before = prompt_logits(model, TOKENS)
    model.without_layers(AWAY)
    assert list(model.weights.layers) == [0, 1, 2, 3]
    assert torch.equal(prompt_logits(model, TOKENS), before)


@pytest.mark.parametrize("piece", ["attention_inputs", "attention_output", "mlp"])
def test_a_piece_of_a_layer_that_is_away_is_refused(piece: str, model: Model) -> None:
    rest = model.without_layers(AWAY)
    hidden = torch.zeros(3, LLAMA.hidden_size)
    inputs: dict[str, Any] = {
        "attention_inputs": rest.rotary(torch.arange(3)),
        "attention_output": torch.zeros(3, LLAMA.num_heads, LLAMA.head_dim),
    }
    with pytest.raises(LayerAway, match=r"layer 2 .*holds layers \[0, 3\]"):
        getattr(rest, piece)(2, hidden, *([inputs[piece]] if piece in inputs else []))


def test_what_is_away_already_cannot_leave(model: Model) -> None:
    with pytest.raises(LayerAway, match="layer 2 "):
        model.without_layers(AWAY).without_layers(range(2, 4))
    with pytest.raises(LayerAway, match="layer 4 "):
        model.without_layers(range(3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_layers_is_free_once_the_old_model_is_gone(dtype: torch.dtype) -> None:
    model: Model | None = random_model(CONFIGS["all biases"], 1, dtype)
    assert model is not None
    leaving = [model.layer(index) for index in AWAY]
    gone = [weakref.ref(one) for layer in leaving for one in (layer, *tensors_of(layer))]
    stays = [weakref.ref(tensor) for tensor in tensors_of(model.layer(0))]
    del leaving
    gc.collect()
    gc.disable()  # what only a collection frees would hold memory for long
    try:
        rest = model.without_layers(AWAY)
        assert all(one() is not None for one in gone)
        model = None
        assert [one() for one in gone if one() is not None] == []
        assert all(one() is not None for one in stays)
    finally:
        gc.enable()
    assert list(rest.weights.layers) == [0, 3]


# Coming back


def test_with_its_layers_back_a_model_computes_as_before(model: Model) -> None:
    before = prompt_logits(model, TOKENS)
    layers = {index: model.layer(index) for index in AWAY}
    back = model.without_layers(AWAY).with_layers(layers)
    assert list(back.weights.layers) == [0, 1, 2, 3]
    assert torch.equal(prompt_logits(back, TOKENS), before)
    assert back.fingerprint == model.fingerprint


def test_layers_can_come_to_a_model_that_never_had_any(model: Model) -> None:
    hosting = model.without_layers(range(4)).with_layers({2: model.layer(2)})
    assert list(hosting.weights.layers) == [2]


def test_layers_that_do_not_fit_are_refused(model: Model) -> None:
    with pytest.raises(WrongLayers, match="no layer 4"):
        model.with_layers({4: model.layer(0)})
    other = random_model(LLAMA, 1, torch.bfloat16)
    with pytest.raises(WrongLayers, match=r"layer 1 is torch\.bfloat16 on cpu, the model torch\.float32"):
        model.with_layers({1: other.layer(1)})


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("away", [range(1), range(1, 3), range(2, 4), range(0)])
def test_a_random_models_layers_are_drawn_again_bit_for_bit(name: str, away: range) -> None:
    model = random_model(CONFIGS[name], 3, torch.bfloat16)
    again = model.without_layers(away).reload_layers(away)
    assert list(again) == list(away)
    assert all(again[index] is not model.layer(index) for index in away)
    assert all(same_bits(again[index], model.layer(index)) for index in away)


def test_a_reloaded_layer_is_held_by_nobody_else(model: Model) -> None:
    layers = model.reload_layers(range(2))
    gone = [weakref.ref(tensor) for layer in layers.values() for tensor in tensors_of(layer)]
    del layers
    assert [one() for one in gone if one() is not None] == []


def test_what_cannot_be_read_again_is_told(model: Model) -> None:
    in_memory = Model(LLAMA, model.weights, fingerprint="")
    with pytest.raises(SourceChanged, match="made in memory"):
        in_memory.without_layers(AWAY).reload_layers(AWAY)
    with pytest.raises(WrongLayers, match=r"range\(3, 5\)"):
        model.reload_layers(range(3, 5))


# As plain tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_made_of_its_tensors_computes_the_same_bits(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    model = random_model(config, 2, dtype)
    rebuilt = {
        index: layer_of(config, layer_tensors(model.layer(index)), dtype=dtype, device=model.device)
        for index in range(config.num_layers)
    }
    assert all(same_bits(rebuilt[index], model.layer(index)) for index in rebuilt)
    other = model.without_layers(range(config.num_layers)).with_layers(rebuilt)
    for tokens in ([7], TOKENS):  # few rows and many take different ways through a product
        assert torch.equal(prompt_logits(other, tokens), prompt_logits(model, tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_have_the_shapes_and_the_order_that_the_config_tells(name: str) -> None:
    config = CONFIGS[name]
    tensors = layer_tensors(random_model(config, 2, torch.bfloat16).layer(0))
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert list(shapes.items()) == list(layer_tensor_shapes(config).items())
    assert all(tensor.is_contiguous() and tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert sum(tensor.nbytes for tensor in tensors.values()) == layer_weight_bytes(config, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rebuilt_layer_keeps_none_of_the_memory_it_was_made_of(dtype: torch.dtype) -> None:
    config = CONFIGS["all biases"]
    tensors = {
        key: one.clone() for key, one in layer_tensors(random_model(config, 2, dtype).layer(0)).items()
    }
    layer = layer_of(config, tensors, dtype=dtype, device=torch.device("cpu"))
    before = {key: tensor.clone() for key, tensor in layer_tensors(layer).items()}
    for tensor in tensors.values():  # a receive buffer takes the next message
        tensor.fill_(float("nan"))
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer_tensors(layer).items())


QWEN3 = CONFIGS["qwen3"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"k_norm": None}, "needs tensor k_norm"),
        ({"down.weight": None}, r"needs tensor down\.weight"),
        ({"qkv.bias": torch.zeros(160)}, r"tensor qkv\.bias is none of a layer"),
        ({"mlp_norm": torch.zeros(73)}, r"mlp_norm came as torch\.float32 \[73\] where .*\[72\]"),
        ({"qkv.weight": torch.zeros(72, 160)}, r"qkv\.weight came as torch\.float32 \[72, 160\]"),
        ({"q_norm": torch.zeros(16, dtype=torch.bfloat16)}, r"q_norm came as torch\.bfloat16 \[16\]"),
    ],
)
def test_tensors_that_make_no_layer_are_named(
    changes: dict[str, torch.Tensor | None], complaint: str
) -> None:
    tensors = layer_tensors(random_model(QWEN3, 2, torch.float32).layer(0)) | changes
    came = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(WrongLayers, match=complaint):
        layer_of(QWEN3, came, dtype=torch.float32, device=torch.device("cpu"))


# Bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_a_layer_are_those_of_every_memory_it_holds(name: str, dtype: torch.dtype) -> None:
    layer = random_model(CONFIGS[name], 2, dtype).layer(0)
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(layer)}
    assert layer_bytes(layer) == sum(storages.values())
    assert layer_bytes(layer) >= layer_weight_bytes(CONFIGS[name], dtype)


def test_memory_that_two_parts_share_counts_once(model: Model) -> None:
    layer = model.layer(0)
    shared = replace(layer, mlp_norm=layer.attention_norm)
    assert layer_bytes(shared) == layer_bytes(layer) - layer.mlp_norm.nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_dropped_layers_leave_the_process() -> None:
    wide = replace(LLAMA, num_layers=12, hidden_size=512, intermediate_size=1536)
    model = random_model(wide, 1, torch.float32)
    leaving = range(2, 10)
    dropped_bytes = sum(layer_bytes(model.layer(index)) for index in leaving)
    if not give_back_freed_memory():
        pytest.skip("this machine's libc has no malloc_trim")
    before = resident_bytes()
    model = model.without_layers(leaving)
    give_back_freed_memory()
    assert resident_bytes() <= before - 0.8 * dropped_bytes
