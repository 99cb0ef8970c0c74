"""What requests ask: plain prompts, prompts that share prefixes by Zipf's law, chats. Pure."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.conversation import Conversation, Turn
from loadtest.words import text_of


@dataclass(frozen=True)
class PromptShape:
    """Lengths in tokens, a word each. `spread` 0.5: each is drawn from half to one and a half of it."""

    prefix_tokens: int = 512
    """Of what is shared; 0: nothing is."""
    suffix_tokens: int = 64
    """Of what each turn brings of its own."""
    output_tokens: int = 64
    spread: float = 0.0
    num_prefixes: int = 16
    zipf: float = 1.0
    """The n-th prefix is asked for in proportion to n ** -zipf; 0: all alike."""
    num_turns: int = 1
    think_seconds: float = 0.0


def conversations(shape: PromptShape, seed: int = 0) -> Iterator[Conversation]:
    """Without end. Equal seeds give equal texts; no two conversations share more than a prefix."""
    drawn = random.Random(f"prompts-{seed}")
    weights = list(itertools.accumulate(rank**-shape.zipf for rank in range(1, shape.num_prefixes + 1)))
    for number in itertools.count():
        (prefix,) = drawn.choices(range(shape.num_prefixes), cum_weights=weights)
        turns: list[Turn] = []
        for turn in range(shape.num_turns):
            own = text_of(f"{seed}-own-{number}-{turn}", _length(drawn, shape.suffix_tokens, shape.spread))
            shared = "" if turn else text_of(f"{seed}-prefix-{prefix}", shape.prefix_tokens)
            num_new = _length(drawn, shape.output_tokens, shape.spread)
            turns.append(Turn(shared + own, num_new))
        yield Conversation(f"{seed}-{number}", tuple(turns), shape.think_seconds)


def _length(drawn: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * drawn.uniform(1 - spread, 1 + spread)))
