"""The work of prompts that the engine does not know of yet, for the load report. Pure."""

import math
from collections.abc import Iterable

from libs.cost.prefill import PrefillCost, num_pairs, work_seconds
from libs.worker.prefill.prompt import Prompt


class WaitingWork:
    """Tokens of these prompts that the engine will compute, as far as the stores have told what they hold."""

    def __init__(self, waiting: Iterable[Prompt], block_size: int) -> None:
        news = [(prompt.num_new_tokens(block_size), prompt.num_tokens) for prompt in waiting]
        self.num_tokens = sum(new for new, _ in news)
        self._num_pairs = sum(num_pairs(new, whole - new) for new, whole in news)

    def seconds(self, cost: PrefillCost, max_step_tokens: int) -> float:
        """How long they will keep the engine busy."""
        num_steps = math.ceil(self.num_tokens / max_step_tokens)
        return work_seconds(cost, num_steps, self.num_tokens, self._num_pairs)
