"""config.json as a ModelConfig: defaults as in transformers, refusals by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.model.config import Architecture, LinearRope, Llama3Rope, within_sliding_window
from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.hf_config import read_eos_token_ids, read_hf_config

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def write(directory: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def read(directory: Path, **changes: Any) -> Any:
    """The config of RAW with changes; a value of None takes the key away."""
    raw = {key: value for key, value in (RAW | changes).items() if value is not None}
    return read_hf_config(write(directory, config=raw))


def test_a_llama_config_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.architecture is Architecture.LLAMA
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (5e5, None, False)
    assert (config.eos_token_ids, config.bos_token_id, config.queries_per_kv_head) == ((2,), 1, 2)


def test_without_their_own_number_kv_heads_are_as_many_as_heads(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "changes", "biases", "qk_norm"),
    [
        ("LlamaForCausalLM", {}, (False, False), False),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True), False),
        ("MistralForCausalLM", {"sliding_window": None}, (False, False), False),
        ("Qwen2ForCausalLM", {}, (True, False), False),
        ("Qwen3ForCausalLM", {"head_dim": 16}, (False, False), True),
    ],
)
def test_families_differ_in_biases_and_norms(
    architecture: str, changes: dict[str, Any], biases: tuple[bool, bool], qk_norm: bool, tmp_path: Path
) -> None:
    config = read(tmp_path, architectures=[architecture], **changes)
    assert (config.attention_bias, config.attention_output_bias) == biases
    assert config.qk_norm is qk_norm


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_is_read_as_old_and_new_files_write_it(key: str, tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert read(tmp_path, **{key: llama3}).rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert read(tmp_path, **{key: {"type": "linear", "factor": 2}}).rope_scaling == LinearRope(2.0)
    assert read(tmp_path, **{key: {"rope_type": "default"}}).rope_scaling is None
    assert read(tmp_path, rope_parameters={"rope_theta": 7.0, "rope_type": "default"}).rope_theta == 7.0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not supported"),
        ({"architectures": None, "model_type": "gemma"}, "model_type 'gemma'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"vocab_size": "320"}, "vocab_size is '320'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot evenly share 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks 'factor'"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=complaint):
        read(tmp_path, **changes)


@pytest.mark.parametrize("content", ["", "{", "[1]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_refused(content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BrokenModel, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"config\.json is missing"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "window"),
    [
        ("LlamaForCausalLM", {"sliding_window": 64}, None),
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, None),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            64,
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
            None,
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "layer_types": ["full_attention"] * 2}, None),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64),
    ],
)
def test_a_sliding_window_counts_only_where_it_is_in_force(
    architecture: str, changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert read(tmp_path, architectures=[architecture], head_dim=16, **changes).sliding_window == window


def test_a_window_is_allowed_where_no_sequence_can_outgrow_it(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert within_sliding_window(config, None) == config
    assert within_sliding_window(replace(config, sliding_window=512), None).max_position_embeddings == 512
    windowed = replace(config, sliding_window=100)
    assert within_sliding_window(windowed, 100).max_position_embeddings == 100
    for too_long in (None, 101):
        with pytest.raises(UnsupportedModel, match="--max-model-len 100"):
            within_sliding_window(windowed, too_long)


def test_ends_of_text_are_gathered_from_every_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [9, 2]},
        tokenizer_config={
            "eos_token": {"content": "<|im_end|>"},
            "added_tokens_decoder": {"7": {"content": "<|im_end|>"}, "8": {"content": "<pad>"}},
        },
    )
    assert read_eos_token_ids(tmp_path) == (9, 2, 7)


def test_a_model_without_an_end_of_text_has_none(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()
