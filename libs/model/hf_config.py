"""`config.json` of a Hugging Face directory as a `ModelConfig`; what is not computed is refused by name."""

import json
from pathlib import Path
from typing import Any

from libs.model.config import Architecture, LinearRope, Llama3Rope, ModelConfig, RopeScaling
from libs.model.errors import BrokenModel, UnsupportedModel

Json = dict[str, Any]

_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture.LLAMA,
    "MistralForCausalLM": Architecture.MISTRAL,
    "Qwen2ForCausalLM": Architecture.QWEN2,
    "Qwen3ForCausalLM": Architecture.QWEN3,
}
_MISTRAL_DEFAULT_WINDOW = 4096  # of a config.json that does not mention it, as in transformers


def read_json(path: Path) -> Json:
    """A JSON object from a file.

    Raises:
        BrokenModel: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModel(f"{path.name} is missing in {path.parent}; download the whole repository") from None
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_if_there(path: Path) -> Json:
    """A JSON object from a file, empty if there is none."""
    return read_json(path) if path.is_file() else {}


def read_hf_config(directory: Path) -> ModelConfig:
    """The config of the model in a directory.

    Raises:
        BrokenModel: keys are missing or contradict each other.
        UnsupportedModel: another architecture, activation, rope scaling, or a quantised checkpoint.
    """
    raw = read_json(directory / "config.json")
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    num_heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias", False))
    rope_theta, rope_scaling = _rope(raw)
    config = ModelConfig(
        architecture=architecture,
        num_layers=_integer(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", num_heads),
        head_dim=_integer(raw, "head_dim", _default_head_dim(architecture, hidden_size, num_heads)),
        intermediate_size=_integer(raw, "intermediate_size"),
        vocab_size=_integer(raw, "vocab_size"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=architecture is Architecture.QWEN2 or attention_bias,
        attention_output_bias=architecture is not Architecture.QWEN2 and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture is Architecture.QWEN3,
        eos_token_ids=read_eos_token_ids(directory),
        bos_token_id=raw.get("bos_token_id"),
        sliding_window=_sliding_window(architecture, raw),
    )
    config.check()
    return config


def _default_head_dim(architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    """Of a config.json that does not name it, as in transformers."""
    return 128 if architecture is Architecture.QWEN3 else hidden_size // max(num_heads, 1)


def _architecture(raw: Json) -> Architecture:
    names: list[str] = raw.get("architectures") or []
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    given = ", ".join(names) or f"model_type {raw.get('model_type')!r}"
    raise UnsupportedModel(
        f"architecture {given} is not supported; supported are {', '.join(_ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Json) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        )
        raise UnsupportedModel(
            f"the checkpoint is quantised with {method!r}, which is not supported; "
            "use the unquantised repository, or a GGUF file"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"activation {activation!r} is not supported; supported is silu")


def _integer(raw: Json, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise BrokenModel(f"config.json: {key} is {value!r}; an integer is needed")
    return value


def _rope(raw: Json) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling` (before)."""
    rope: Json = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; heads are rotated whole")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    try:
        return theta, _rope_scaling(kind, rope)
    except KeyError as error:
        raise BrokenModel(f"config.json: rope scaling {kind!r} lacks {error}") from error


def _rope_scaling(kind: str, rope: Json) -> RopeScaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRope(float(rope["factor"]))
        case "llama3":
            return Llama3Rope(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
            )
        case _:
            raise UnsupportedModel(
                f"rope scaling {kind!r} is not supported; supported are linear and llama3. "
                "If the model was trained without it, remove it from config.json"
            )


def _sliding_window(architecture: Architecture, raw: Json) -> int | None:
    """The window that is in force, or None."""
    default = _MISTRAL_DEFAULT_WINDOW if architecture is Architecture.MISTRAL else None
    window = raw.get("sliding_window", default)
    if architecture is Architecture.MISTRAL:
        return window
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    in_force = (
        raw.get("use_sliding_window", False) and raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    )
    return window if in_force else None


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ends of text, from all files that name one.

    config.json alone may lack the end of a turn: instruction-tuned models name it in generation_config.json
    or as the tokenizer's `eos_token`.
    """
    generation = read_if_there(directory / "generation_config.json")
    tokenizer = read_if_there(directory / "tokenizer_config.json")
    listed = [generation.get("eos_token_id"), read_if_there(directory / "config.json").get("eos_token_id")]
    eos = tokenizer.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    added: dict[str, Json] = tokenizer.get("added_tokens_decoder") or {}
    listed.extend(
        int(number) for number, token in added.items() if eos is not None and token.get("content") == eos
    )
    ids: dict[int, None] = {}
    for value in listed:
        ids.update(dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value]))
    return tuple(ids)
