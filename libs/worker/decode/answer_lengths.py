"""How long answers are here, as a running mean: routers keep so much room for the next. Pure."""

WINDOW = 64
"""Answers that the mean reaches back, about."""


class AnswerLengths:
    """The mean over all answers until there are `WINDOW`, weighted towards the latest from then on."""

    def __init__(self) -> None:
        self.mean_tokens = 0.0
        """0: none has ended yet."""
        self._num = 0

    def add(self, num_tokens: int) -> None:
        """One has ended."""
        self._num = min(self._num + 1, WINDOW)
        self.mean_tokens += (num_tokens - self.mean_tokens) / self._num
