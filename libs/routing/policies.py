"""Which of the candidates runs the prompt: pure choices, named as the setting names them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from libs.routing.candidates import Draw, Floats, Ints, PrefillCandidates, Prompt
from libs.routing.predicting import predict

Policy = Callable[[Prompt, PrefillCandidates, Draw], int]
"""The index of the one chosen."""

NEAR_SECONDS = 1e-3
NEAR_SHARE = 0.05
NEAR_MOST_SECONDS = 0.05
"""Candidates this close to the best count as equal: less is noise, and several routers that all took the one
best would pile their prompts up there until its next report."""


def round_robin(prompt: Prompt, candidates: PrefillCandidates, draw: Draw) -> int:
    """Each in its turn."""
    return draw.turn % len(candidates)


def random(prompt: Prompt, candidates: PrefillCandidates, draw: Draw) -> int:
    """Any."""
    return int(draw.first * len(candidates))


def power_of_two(prompt: Prompt, candidates: PrefillCandidates, draw: Draw) -> int:
    """Of two drawn at random, the one with less work."""
    num = len(candidates)
    one = int(draw.first * num)
    if num == 1:
        return one
    other = (one + 1 + int(draw.second * (num - 1))) % num
    return one if candidates.queued_seconds[one] <= candidates.queued_seconds[other] else other


def least_load(prompt: Prompt, candidates: PrefillCandidates, draw: Draw) -> int:
    """The least seconds of work, whatever is cached where. Source: BanaServe."""
    return _best(candidates.queued_seconds, candidates.num_prompts, draw)


def prefix_affinity(prompt: Prompt, candidates: PrefillCandidates, draw: Draw) -> int:
    """The longest prefix in the instance's own pool, then the least work. The baseline that BanaServe
    attacks: those who are hot get hotter."""
    local = candidates.num_local_blocks
    longest = np.flatnonzero(local == local.max())
    return int(longest[_best(candidates.queued_seconds[longest], candidates.num_prompts[longest], draw)])


def predicted_ttft(prompt: Prompt, candidates: PrefillCandidates, draw: Draw) -> int:
    """Where the first token comes soonest: queue, prefill of what is cached nowhere, fetch as far as nothing
    hides it. Of equals, where the least has to be fetched."""
    predicted = predict(prompt, candidates)
    return _best(
        predicted.ttft_seconds, candidates.num_prompts, draw, num_fetched=predicted.num_fetched_blocks
    )


def _best(seconds: Floats, num_prompts: Ints, draw: Draw, num_fetched: Ints | None = None) -> int:
    """Of those near the least seconds, one with the fewest prompts, then blocks to fetch; of several, any."""
    least = float(seconds.min())
    margin = max(NEAR_SECONDS, min(NEAR_SHARE * least, NEAR_MOST_SECONDS))
    near = np.flatnonzero(seconds <= least + margin)
    for counts in (num_prompts, num_fetched):
        if counts is not None and len(near) > 1:
            near = near[counts[near] == counts[near].min()]
    return int(near[int(draw.first * len(near))])


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "round_robin": round_robin,
        "random": random,
        "power_of_two": power_of_two,
        "least_load": least_load,
        "prefix_affinity": prefix_affinity,
        "predicted_ttft": predicted_ttft,
    }
)
