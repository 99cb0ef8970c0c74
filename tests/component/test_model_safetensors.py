"""Models from safetensors: shards, damage, quantised numbers, progress, fingerprints."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import tensor_shapes
from safetensors.torch import load_file, save_file

from libs.model.config import Architecture, ModelConfig
from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.load import load_model

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
RAW_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 200,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
ONE_LAYER = "model.layers.0."


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small Llama in one file."""
    generator = torch.Generator().manual_seed(7)
    shapes = tensor_shapes(CONFIG)
    save(tmp_path, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIG))
    return tmp_path


def save(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors")


def change(directory: Path, name: str, tensor: torch.Tensor) -> None:
    save(directory, load_file(directory / "model.safetensors") | {name: tensor})


def shard(directory: Path) -> None:
    """Splits the weights into two files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"part-{int(name.startswith(ONE_LAYER))}.safetensors" for name in tensors}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, directory / part)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def fingerprint(directory: Path, dtype: torch.dtype = torch.float32) -> str:
    return load_model(directory, dtype=dtype).fingerprint


def test_progress_rises_to_one(directory: Path) -> None:
    told: list[float] = []
    load_model(directory, dtype=torch.bfloat16, on_progress=told.append)
    assert told == sorted(told)
    assert 0 < told[0] < 0.5
    assert told[-1] == 1.0
    assert len(told) > CONFIG.num_layers


def test_a_checkpoint_gives_the_same_model_in_one_file_and_in_shards(directory: Path) -> None:
    whole = load_model(directory, dtype=torch.float32)
    shard(directory)
    sharded = load_model(directory, dtype=torch.float32)
    assert torch.equal(whole.weights.layers[0].qkv.weight, sharded.weights.layers[0].qkv.weight)
    assert whole.fingerprint == sharded.fingerprint


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard(directory)
    (directory / "part-1.safetensors").unlink()
    with pytest.raises(BrokenModel, match=r"lacks part-1\.safetensors"):
        load_model(directory, dtype=torch.float32)


def test_pickled_weights_are_refused_with_what_to_download(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(BrokenModel, match="download the safetensors weights"):
        load_model(directory, dtype=torch.float32)


@pytest.mark.parametrize("keep_bytes", [0, 4, 8, 300, -1])
def test_a_file_cut_short_is_refused(keep_bytes: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(BrokenModel, match="not a complete safetensors file"):
        load_model(directory, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_quantised_tensors_are_refused_by_name(dtype: torch.dtype, directory: Path) -> None:
    change(directory, "model.layers.1.mlp.down_proj.weight", torch.ones(64, 96).to(dtype))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds"):
        load_model(directory, dtype=torch.float32)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_converted_from_the_dtype_they_are_stored_in(
    stored: torch.dtype, directory: Path
) -> None:
    tensor = torch.randn(64, 96)
    change(directory, "model.layers.1.mlp.down_proj.weight", tensor.to(stored))
    model = load_model(directory, dtype=torch.float32)
    assert torch.equal(model.weights.layers[1].down.weight, tensor.to(stored).to(torch.float32))


def test_a_head_stored_beside_tied_embeddings_is_not_used(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(RAW_CONFIG | {"tie_word_embeddings": True}))
    model = load_model(directory, dtype=torch.float32)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.weights.head.weight, embedding)
    assert torch.equal(model.embed(torch.tensor([3, 199])), embedding[[3, 199]])


def test_stored_rope_frequencies_of_old_checkpoints_are_ignored(directory: Path) -> None:
    change(directory, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    load_model(directory, dtype=torch.float32)


def test_the_model_keeps_no_memory_map_of_its_file(directory: Path) -> None:
    model = load_model(directory, dtype=torch.float32)
    before = model.weights.final_norm.clone()
    path = directory / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)  # the same file, so a mapping would show it
    assert torch.equal(model.weights.final_norm, before)


def test_a_fingerprint_is_the_same_in_another_process_and_place(
    directory: Path, tmp_path_factory: Any
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model"
    shutil.copytree(directory, elsewhere)
    program = (
        "import sys, torch; from pathlib import Path; from libs.model.load import load_model;"
        "print(load_model(Path(sys.argv[1]), dtype=torch.float32).fingerprint)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(elsewhere)], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == fingerprint(directory)


def test_a_fingerprint_changes_with_weights_config_and_dtype(directory: Path) -> None:
    seen = {fingerprint(directory), fingerprint(directory, torch.bfloat16)}
    tensor = load_file(directory / "model.safetensors")["model.norm.weight"].clone()
    tensor[-1] += 1
    change(directory, "model.norm.weight", tensor)
    seen.add(fingerprint(directory))
    (directory / "config.json").write_text(json.dumps(RAW_CONFIG | {"rope_theta": 5e5}))
    seen.add(fingerprint(directory))
    assert len(seen) == 4


def test_a_fingerprint_does_not_change_with_ends_of_text(directory: Path) -> None:
    before = fingerprint(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = load_model(directory, dtype=torch.float32)
    assert model.config.eos_token_ids == (7, 9)
    assert model.fingerprint == before
