"""Layers read again from the files a model was loaded from: the same bits, or a clear refusal."""

import gc
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dense_reference import prompt_logits
from gguf_names import GGUF_NAMES
from random_model import tensor_shapes
from safetensors.torch import load_file, save_file

from libs.model import layer_files
from libs.model.config import Architecture, ModelConfig
from libs.model.errors import SourceChanged
from libs.model.layer_weights import layer_tensors
from libs.model.load import find_model, load_model
from libs.model.model import Model

CONFIG = ModelConfig(
    architecture=Architecture.QWEN3,
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=200,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    qk_norm=True,
)
RAW_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 200,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
AWAY = range(1, 3)
WEIGHTS = "model.safetensors"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(CONFIG).items()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small Qwen3 in one file."""
    save_file(weights(), tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG))
    return tmp_path


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load_model(find_model("smollm2-135m-instruct"), dtype=torch.bfloat16)


def assert_comes_back(model: Model, away: range) -> Model:
    """Reloads layers into a model that lacks them, and compares them bit for bit."""
    rest = model.without_layers(away)
    layers = rest.reload_layers(away)
    assert list(layers) == list(away)
    for index, layer in layers.items():
        expected = layer_tensors(model.layer(index))
        tensors = layer_tensors(layer)
        assert list(tensors) == list(expected)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    return rest.with_layers(layers)


def shard(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    weight_map = {name: f"part-{int('layers.2.' in name)}.safetensors" for name in tensors}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, directory / part)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_layers_of_a_gguf_file_come_back_bit_for_bit(smollm2: Model) -> None:
    again = assert_comes_back(smollm2, range(10, 20))
    tokens = [1, 504, 3575, 282, 4649]
    assert torch.equal(prompt_logits(again, tokens), prompt_logits(smollm2, tokens))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_layers_of_a_directory_come_back_bit_for_bit(is_sharded: bool, directory: Path) -> None:
    if is_sharded:
        shard(directory)
    model = load_model(directory, dtype=torch.bfloat16)
    again = assert_comes_back(model, AWAY)
    assert torch.equal(prompt_logits(again, [3, 4, 5]), prompt_logits(model, [3, 4, 5]))


def test_layers_come_back_in_another_thread(smollm2: Model) -> None:
    found: list[Model] = []
    thread = threading.Thread(target=lambda: found.append(assert_comes_back(smollm2, range(2))))
    thread.start()
    thread.join()
    assert len(found) == 1


def test_a_path_that_was_relative_is_found_from_elsewhere(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    model = load_model(Path(directory.name), dtype=torch.float32)
    monkeypatch.chdir("/")
    assert_comes_back(model, AWAY)


def test_the_files_are_not_held_open_between(directory: Path) -> None:
    model = load_model(directory, dtype=torch.float32)
    layers = model.reload_layers(AWAY)
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(directory) not in maps
    assert not any(str(directory) in path for path in opened)
    assert list(layers) == list(AWAY)


# Files that changed


def remove(directory: Path) -> None:
    (directory / WEIGHTS).unlink()


def remove_all(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


def cut(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:-100])


def train_on(directory: Path) -> None:
    save_file({name: 1.01 * tensor for name, tensor in weights().items()}, directory / WEIGHTS)


def lose_a_tensor(directory: Path) -> None:
    kept = {name: tensor for name, tensor in weights().items() if "layers.1.mlp.down" not in name}
    save_file(kept, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (remove, "has neither model.safetensors"),
        (remove_all, "is gone"),
        (cut, "not a complete safetensors file"),
        (train_on, "holds other weights"),
        (lose_a_tensor, "holds other weights"),
    ],
)
def test_files_that_changed_are_refused_with_what_to_do(change: Any, complaint: str, directory: Path) -> None:
    model = load_model(directory, dtype=torch.float32)
    change(directory)
    with pytest.raises(SourceChanged, match=complaint) as refused:
        model.reload_layers(AWAY)
    assert "put " in str(refused.value)


def test_files_written_again_with_the_same_weights_serve(directory: Path) -> None:
    model = load_model(directory, dtype=torch.float32)
    again = dict(reversed(weights().items()))
    (directory / WEIGHTS).unlink()
    save_file(again, directory / WEIGHTS, metadata={"copied": "yes"})
    assert_comes_back(model, AWAY)


def test_a_gguf_file_that_is_gone_cut_or_other_is_refused(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "model.gguf", scale=1.0)
    model = load_model(path, dtype=torch.float32)
    content = path.read_bytes()
    assert_comes_back(model, AWAY)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceChanged, match="cannot be read again"):
        model.reload_layers(AWAY)
    small_gguf(path, scale=2.0)
    with pytest.raises(SourceChanged, match="holds other weights"):
        model.reload_layers(AWAY)
    path.unlink()
    with pytest.raises(SourceChanged, match="is gone"):
        model.reload_layers(AWAY)
    path.write_bytes(content)
    assert_comes_back(model, AWAY)


def test_a_file_replaced_while_it_is_read_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(directory, dtype=torch.float32)
    assemble_layers = layer_files.assemble_layers

    def replace_meanwhile(*args: Any, **kwargs: Any) -> Any:
        found = list(assemble_layers(*args, **kwargs))
        (directory / WEIGHTS).unlink()
        train_on(directory)
        return found

    monkeypatch.setattr(layer_files, "assemble_layers", replace_meanwhile)
    with pytest.raises(SourceChanged, match="holds other weights"):
        model.reload_layers(AWAY)


def small_gguf(path: Path, scale: float) -> Path:
    """CONFIG's weights without q and k norms, as llama.cpp writes a Qwen2-like model of that shape."""
    config = replace(CONFIG, architecture=Architecture.QWEN2, qk_norm=False, attention_bias=True)
    writer = gguf.GGUFWriter(path, "qwen2")
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
    random = np.random.default_rng(3)
    for name, shape in tensor_shapes(config).items():
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, (scale * random.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
