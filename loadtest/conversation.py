"""What is sent, whoever made it up: conversations of one or several turns, each at its time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `prompt` is a text or token ids; in later turns it follows the answers so far."""

    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns after each other, each `think_seconds` after the answer before. One turn: a plain request."""

    name: str
    turns: tuple[Turn, ...]
    think_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A conversation that begins `at_seconds` after the start of the test, whatever else is under way."""

    at_seconds: float
    conversation: Conversation


def arrivals_of(times: Iterable[float], conversations: Iterable[Conversation]) -> Iterator[Arrival]:
    """One conversation at each time, until either ends."""
    return (Arrival(at, talk) for at, talk in zip(times, conversations, strict=False))


def within(
    arrivals: Iterable[Arrival], *, duration_seconds: float | None, num_conversations: int | None
) -> Iterator[Arrival]:
    """Those before the duration is over, at most so many. `arrivals` come in order of time."""
    if duration_seconds is not None:
        arrivals = takewhile(lambda arrival: arrival.at_seconds < duration_seconds, arrivals)
    return islice(arrivals, num_conversations)
