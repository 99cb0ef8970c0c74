"""What a mesh must say: the same weights as one function of all tokens, without pages, batches or workers."""

import os

import torch
from dense_reference import DenseCache, last_logits

from libs.model.load import find_model, load_model
from libs.model.tokenizer import load_tokenizer

MIN_GAP = 2e-4
"""Between the best two logits of the tiny model: sums in another order differ by 3e-5."""


class Reference:
    """Texts of the model at `source`. Answers of a random model must be far from a tie between two tokens."""

    def __init__(self, source: str) -> None:
        path = find_model(source)
        self._model = load_model(path, dtype=torch.float32)
        self._tokenizer = load_tokenizer(path)
        self._is_tiny = path.is_dir()

    def texts(self, prompts: list[str], max_tokens: int) -> list[str]:
        """The greedy text after each prompt; ends of text do not end it."""
        # Of a tiny model, threads that wait for each other take longer than the work.
        torch.set_num_threads(1 if self._is_tiny else os.cpu_count() or 1)
        caches = [DenseCache(self._model.config.num_layers) for _ in prompts]
        steps = [self._tokenizer.encode(prompt) for prompt in prompts]
        chosen: list[list[int]] = [[] for _ in prompts]
        gap = float("inf")
        for _ in range(max_tokens):
            best = last_logits(self._model, steps, caches).topk(2)
            gap = min(gap, float((best.values[:, 0] - best.values[:, 1]).min()))
            steps = [[token_id] for token_id in best.indices[:, 0].tolist()]
            for token_ids, step in zip(chosen, steps, strict=True):
                token_ids.extend(step)
        assert gap >= MIN_GAP or not self._is_tiny, (
            f"the best two tokens are {gap} apart: choose another seed in tiny_model"
        )
        return [self._tokenizer.decode(token_ids) for token_ids in chosen]
