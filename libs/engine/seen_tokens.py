"""Which tokens a sequence holds, and how often it put them out: what penalties look at."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libs.request.sampling import SamplingParams


class SeenTokens:
    """Distinct token ids with their output counts, in arrays that grow, so that a step copies no history.

    A token of the prompt alone has the count 0.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(256, dtype=np.int64)
        self._counts = np.zeros(256, dtype=np.float32)
        for token_id in token_ids[:num_prompt_tokens]:
            self._find(token_id)
        for token_id in token_ids[num_prompt_tokens:]:
            self.add(token_id)

    @classmethod
    def when_needed(
        cls, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams
    ) -> "SeenTokens | None":
        """None where no penalty asks for it."""
        if not has_penalties(sampling):
            return None
        return cls(token_ids, num_prompt_tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct token ids of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` is in the output."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._find(token_id)  # first: it may replace the arrays
        self._counts[place] += 1

    def _find(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        return place


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether earlier tokens change the logits."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
