"""The work of prompts that the engine does not know of yet, for the load report. Pure."""

import math

from libs.cost.prefill import PrefillCost, num_pairs, work_seconds
from services.prefill_worker.prompts import Prompts


class WaitingWork:
    """What they will ask of the engine, as far as the stores have told what they hold."""

    def __init__(self, prompts: Prompts, block_size: int) -> None:
        waiting = [prompt for prompt in prompts if not prompt.is_begun]
        news = [prompt.num_new_tokens(block_size) for prompt in waiting]
        self.num_tokens = sum(news)
        self._num_pairs = sum(
            num_pairs(new, prompt.num_tokens - new) for prompt, new in zip(waiting, news, strict=True)
        )

    def seconds(self, cost: PrefillCost, max_step_tokens: int) -> float:
        """How long they will keep it busy."""
        num_steps = math.ceil(self.num_tokens / max_step_tokens)
        return work_seconds(cost, num_steps, self.num_tokens, self._num_pairs)
