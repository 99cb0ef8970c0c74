"""One sequence to generate, as it travels from the gateway to the workers."""

import msgspec
import numpy as np

from libs.request.sampling import SamplingParams


class Generation(msgspec.Struct, frozen=True):
    """One attempt at one sequence.

    `request_id` names the attempt: a replay after a fault gets a new one, so that late messages of the old
    attempt match nothing. `token_ids` holds the prompt, then tokens that an earlier attempt already
    delivered, as little-endian int32; the first new token has index `num_tokens(self) - num_prompt_tokens`.
    """

    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    sampling: SamplingParams
    gateway: str
    """Incarnation of the gateway that the tokens go to."""
    deadline_unix_seconds: float
    cache_salt: str = ""
    traceparent: str = ""
    tenant: str = ""
    """Who asks, as an opaque short name, for traces; it tells neither the API key nor the salt."""


def pack_token_ids(token_ids: "list[int] | np.ndarray") -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_token_ids`."""
    token_ids: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return token_ids


def num_tokens(generation: Generation) -> int:
    """Tokens of the prompt and of earlier attempts together."""
    return len(generation.token_ids) // 4
