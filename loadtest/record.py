"""What became of each request."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """One request; times are seconds after the start of the test."""

    conversation: str
    turn: int
    due_seconds: float
    """When it should have been sent."""
    sent_seconds: float | None = None
    """Later than due where too many were open already. None: it never was."""
    token_seconds: list[float] = field(default_factory=list)
    """When each piece of the answer came; of most servers each piece is a token."""
    end_seconds: float | None = None
    error: str = ""
    """http_429, timeout, unreachable, broken_off, error_event, bad_answer; empty: none."""
    detail: str = ""
    was_cancelled: bool = False
    """The test ended before the answer did."""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_told_tokens: int | None = None
    """Of the answer, by the server's count."""

    @property
    def is_good(self) -> bool:
        """The answer came whole."""
        return self.end_seconds is not None and not self.error and not self.was_cancelled

    @property
    def num_output_tokens(self) -> int:
        """By the server's count where it tells one, else the pieces that came."""
        return len(self.token_seconds) if self.num_told_tokens is None else self.num_told_tokens

    @property
    def held_back_seconds(self) -> float:
        """How long it waited here to be sent."""
        return 0.0 if self.sent_seconds is None else max(0.0, self.sent_seconds - self.due_seconds)

    @property
    def first_token_seconds(self) -> float | None:
        """From sending to the first piece of the answer."""
        if self.sent_seconds is None or not self.token_seconds:
            return None
        return self.token_seconds[0] - self.sent_seconds

    @property
    def total_seconds(self) -> float | None:
        """From sending to the end."""
        if self.sent_seconds is None or self.end_seconds is None:
            return None
        return self.end_seconds - self.sent_seconds

    @property
    def gaps_seconds(self) -> list[float]:
        """Between the pieces."""
        return [later - earlier for earlier, later in pairwise(self.token_seconds)]

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean over the tokens after the first."""
        if len(self.token_seconds) < 2 or self.num_output_tokens < 2:
            return None
        return (self.token_seconds[-1] - self.token_seconds[0]) / (self.num_output_tokens - 1)
