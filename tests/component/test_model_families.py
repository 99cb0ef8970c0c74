"""Each family gives the logits of transformers, from the files that transformers writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_reference import DenseCache, forward, prompt_logits
from random_model import random_model

from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.load import load_model

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("Llama", {}),
    "llama, as many KV heads as heads": ("Llama", {"num_key_value_heads": 4}),
    "llama, one KV head": ("Llama", {"num_key_value_heads": 1}),
    "llama, tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads wider than hidden / heads": ("Llama", {"head_dim": 32}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2, biases on q, k, v": ("Qwen2", {}),
    "qwen2, tied embeddings": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3, q and k norms": ("Qwen3", {"head_dim": 32}),
}


def save(directory: Path, family: str, **settings: Any) -> Any:
    """A transformers model with random weights, norms and biases too, and its files."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SMALL | settings))
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    reference.save_pretrained(directory, max_shard_size="60KB")
    return reference


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, settings = FAMILIES[case]
    reference = save(tmp_path, family, **settings)
    token_ids = torch.randint(0, SMALL["vocab_size"], (150,)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0]
    model = load_model(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(prompt_logits(model, token_ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_bfloat16_stays_near_float32(family: str, tmp_path: Path) -> None:
    save(tmp_path, family, initializer_range=0.05)
    token_ids = list(range(3, 60))
    exact = prompt_logits(load_model(tmp_path, dtype=torch.float32), token_ids)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert (model.dtype, model.embed(torch.tensor([1])).dtype) == (torch.bfloat16, torch.bfloat16)
    rounded = prompt_logits(model, token_ids)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_sharded_checkpoint_was_really_sharded_in_these_tests(tmp_path: Path) -> None:
    save(tmp_path, "Llama")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


def test_tokens_in_two_steps_give_the_logits_of_one(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3", head_dim=32)
    model = load_model(tmp_path, dtype=torch.float32)
    token_ids = list(range(40))
    caches = [DenseCache(model.config.num_layers)]
    parts = torch.cat([forward(model, [token_ids[:23]], caches), forward(model, [token_ids[23:]], caches)])
    torch.testing.assert_close(parts, prompt_logits(model, token_ids), atol=1e-4, rtol=1e-4)


def test_sequences_in_one_row_of_tokens_do_not_touch_each_other(tmp_path: Path) -> None:
    save(tmp_path, "Llama")
    model = load_model(tmp_path, dtype=torch.float32)
    sequences = [list(range(30)), [7], list(range(100, 117))]
    together = forward(model, sequences, [DenseCache(model.config.num_layers) for _ in sequences])
    alone = torch.cat([prompt_logits(model, sequence) for sequence in sequences])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_no_tokens_are_a_step_too(tmp_path: Path) -> None:
    save(tmp_path, "Llama")
    model = load_model(tmp_path, dtype=torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    q, k, v = model.attention_inputs(0, model.embed(none), model.rotary(none))
    hidden = model.mlp(0, model.attention_output(0, model.embed(none), q))
    assert (q.shape, k.shape, v.shape) == ((0, 4, 16), (0, 2, 16), (0, 2, 16))
    assert model.logits(hidden).shape == (0, 320)


def test_a_sliding_window_is_refused_unless_sequences_fit_into_it(tmp_path: Path) -> None:
    reference = save(tmp_path, "Mistral", sliding_window=64)
    with pytest.raises(UnsupportedModel, match="--max-model-len 64"):
        load_model(tmp_path, dtype=torch.float32)
    model = load_model(tmp_path, dtype=torch.float32, max_model_len=64)
    assert model.config.max_position_embeddings == 64
    token_ids = list(range(64))
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(prompt_logits(model, token_ids), expected, atol=1e-4, rtol=1e-4)


def test_a_random_model_follows_from_its_seed(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2")
    config = load_model(tmp_path, dtype=torch.float32).config
    one, same, other = (random_model(config, seed, torch.float32) for seed in (1, 1, 2))
    logits = [prompt_logits(model, [1, 2, 3]) for model in (one, same, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert random_model(config, 1, torch.bfloat16).fingerprint != one.fingerprint


def test_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "Llama")
    with pytest.raises(UnsupportedModel, match="int8"):
        load_model(tmp_path, dtype=torch.int8)


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("num_hidden_layers", 4, r"lack tensor model\.layers\.3\."),
        ("num_hidden_layers", 2, r"the config does not explain, such as model\.layers\.2\."),
        (
            "intermediate_size",
            97,
            r"gate_proj\.weight has shape \[96, 64\] where .* \[97, 64\]",
        ),
        ("attention_bias", True, r"lack tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    setting: str, value: object, complaint: str, tmp_path: Path
) -> None:
    save(tmp_path, "Llama")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {setting: value}))
    with pytest.raises(BrokenModel, match=complaint):
        load_model(tmp_path, dtype=torch.float32)
