"""How long the model takes for new tokens of a prompt.

Compute grows with the tokens (projections, MLP) and with the pairs of tokens that attend to each other; each
step costs something by itself (launches, weights read). Source: BanaServe's prefill term,
`2*P_layer*n + 4*d_model*n*(context + n/2)` per layer, with the rates measured instead of looked up.
"""

import math

import msgspec

MAX_STEP_TOKENS = 2048
"""New tokens of a prompt that one step takes, where the caller does not say."""


class PrefillCost(msgspec.Struct, frozen=True):
    """What the model costs at one worker: `step + token*n + pair*n*(context + n/2)` seconds for a step."""

    step_seconds: float
    """For a step, whatever is in it."""
    token_seconds: float
    """For each new token."""
    pair_seconds: float
    """For each pair of a new token and one before it."""


DEFAULT_PREFILL_COST = PrefillCost(step_seconds=2e-3, token_seconds=2e-4, pair_seconds=2e-8)
"""Before anything was measured: the order of a small model on a few CPU cores."""


def num_pairs(num_new_tokens: float, num_context_tokens: float) -> float:
    """Pairs of tokens that attend: each new one with the context, and half of the new ones on average.
    Of several sequences in one step, pairs add up."""
    return num_new_tokens * (num_context_tokens + 0.5 * num_new_tokens)


def prefill_seconds(
    cost: PrefillCost,
    num_new_tokens: float,
    num_context_tokens: float,
    *,
    max_step_tokens: int = MAX_STEP_TOKENS,
) -> float:
    """Seconds for `num_new_tokens` behind `num_context_tokens` whose KV is there, in steps of at most
    `max_step_tokens`; 0 for no new tokens.

    Raises ValueError for negative counts or steps without tokens.
    """
    if num_new_tokens < 0 or num_context_tokens < 0 or max_step_tokens < 1:
        raise ValueError(
            f"counts of tokens cannot be negative and a step takes at least one: got {num_new_tokens} new, "
            f"{num_context_tokens} of context, {max_step_tokens} a step"
        )
    num_steps = math.ceil(num_new_tokens / max_step_tokens)
    return work_seconds(cost, num_steps, num_new_tokens, num_pairs(num_new_tokens, num_context_tokens))


def work_seconds(cost: PrefillCost, num_steps: int, num_new_tokens: float, pairs: float) -> float:
    """Seconds for steps with these new tokens and `num_pairs` in them, of however many sequences."""
    return cost.step_seconds * num_steps + cost.token_seconds * num_new_tokens + cost.pair_seconds * pairs
