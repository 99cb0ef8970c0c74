"""What a model is, apart from its weights. No torch here: the gateway reads it too."""

from dataclasses import asdict, dataclass, replace
from enum import Enum

from libs.model.errors import BrokenModel, UnsupportedModel


class Architecture(Enum):
    """Families that `Model` computes; they differ in biases and in q/k norms only."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True)
class LinearRope:
    """Every position is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's scaling: long wavelengths stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class FrequencyRope:
    """One divisor per frequency, as GGUF files store Llama 3.1's scaling (`rope_freqs.weight`)."""

    divisors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | FrequencyRope


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model; `check` tells contradictions."""

    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on the q, k and v projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sliding_window: int | None = None
    """Tokens that attention may look back, where the model asks for it; see `within_sliding_window`."""

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def check(self) -> None:
        """Raises BrokenModel for shapes that cannot be."""
        sizes = {
            name: value
            for name, value in asdict(self).items()
            if name.startswith(("num_", "hidden", "head_"))
        }
        for name, value in sizes.items():
            if value < 1:
                raise BrokenModel(f"config: {name} is {value}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise BrokenModel(
                f"config: {self.num_heads} heads cannot evenly share {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise BrokenModel(f"config: head_dim {self.head_dim} is odd; rotary embeddings need an even one")


def within_sliding_window(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    """The config bounded to lengths at which its sliding window changes nothing.

    Sliding-window attention is not computed. Up to the window's length it equals full attention, so with
    `max_model_len` at most the window the model is served, bounded to that length.

    Raises:
        UnsupportedModel: sequences could outgrow the window.
    """
    window = config.sliding_window
    if window is None or window >= config.max_position_embeddings:
        return config
    if max_model_len is None or max_model_len > window:
        raise UnsupportedModel(
            f"this model uses sliding-window attention over {window} tokens, which is not supported; "
            f"serve it with --max-model-len {window} or less, where the window makes no difference"
        )
    return replace(config, max_position_embeddings=max_model_len)
