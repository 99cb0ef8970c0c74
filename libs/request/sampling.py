"""How the next token of a sequence is chosen: the parameters of the OpenAI API and the usual extensions."""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of one sequence. Validated at the gateway; everything behind it trusts these bounds.

    `temperature` 0 means greedy. Noise is drawn from (`seed`, position), so a replay on another worker
    continues the same text. Penalties count output tokens (`repetition_penalty` also counts the prompt, as
    in the CTRL paper and in vLLM). `logprobs` None: none; 0: only of the chosen token; n: also of the n
    most likely.
    """

    max_tokens: Annotated[int, Meta(ge=1)] = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one chosen token and of the likeliest ones at its position, before any filter."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
