"""From tokens to text that may be shown: detokenised, cut at stop strings, with its tokens beside it. Pure.

A token is shown together with the text that it completes; text that may become a stop string is held back
together with its tokens. The texts of all tokens shown, joined, are the text shown: a token that only begins
a character, one that is special, and one behind the cut have an empty text.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from libs.request.sampling import TokenLogprobs
from services.gateway.generation.stop_strings import StopStrings


class Detokenizing(Protocol):
    """Turns tokens into text piece by piece; never gives out half a character."""

    def push(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        ...

    def finish(self) -> str:
        """What is left: bytes that never became a character, as U+FFFD."""
        ...


class ShownToken(NamedTuple):
    """One token of a text with its place there (`offset`, in characters of the answer)."""

    token_id: int
    text: str
    offset: int
    logprobs: TokenLogprobs | None
    is_cut: bool = False
    """Its text is not what the token says: it ended the sequence, or a stop string cut it."""


@dataclass(slots=True)
class Piece:
    """What one delta adds to the answer. `tokens` is filled only where log-probabilities are asked for."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class SequenceText:
    """The text of one sequence. After `stopped` no further token is taken."""

    def __init__(
        self,
        detokenizer: Detokenizing,
        *,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        keeps_tokens: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._keeps_tokens = keeps_tokens
        self._held: deque[ShownToken] = deque()
        self._num_tokens = 0
        self._num_chars_in = 0
        self._num_chars_out = 0
        self._piece = Piece()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.stopped

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None, *, hidden: bool = False) -> None:
        """Take the next token; a `hidden` one (end of sequence) counts but adds no text."""
        text = "" if hidden else self._detokenizer.push([token_id])
        self._num_tokens += 1
        self._take(text)
        if self._keeps_tokens:
            self._held.append(ShownToken(token_id, text, self._num_chars_in - len(text), logprobs, hidden))
            self._show_tokens()

    def finish(self) -> None:
        """No more tokens come: give out what is held back. The last `take` has it."""
        if not self.stopped:
            rest = self._detokenizer.finish()
            self._take(rest)
            self._give(self._stops.finish())
            if rest and self._held:
                last = self._held.pop()
                self._held.append(last._replace(text=last.text + rest))
        self._show_tokens(all_of_them=True)

    def take(self) -> Piece:
        """What may be shown since the last call."""
        piece, self._piece = self._piece, Piece()
        return piece

    def _take(self, text: str) -> None:
        self._num_chars_in += len(text)
        if self._num_tokens <= self._min_tokens:
            self._give(text)
        elif text:
            self._give(self._stops.push(text))

    def _give(self, text: str) -> None:
        self._piece.text += text
        self._num_chars_out += len(text)

    def _show_tokens(self, *, all_of_them: bool = False) -> None:
        """Move tokens whose text is out to the piece; at the end also the others, cut to what is out."""
        num_chars_out = self._num_chars_out
        while self._held:
            token = self._held[0]
            if not (token.text or all_of_them or self.stopped) and len(self._held) == 1:
                return  # it may begin a character that only `finish` ends
            num_left = num_chars_out - token.offset
            if num_left < len(token.text) and not (all_of_them or self.stopped):
                return
            if num_left < len(token.text) or (self.stopped and num_left <= 0):
                text, offset = token.text[: max(0, num_left)], min(token.offset, num_chars_out)
                token = token._replace(text=text, offset=offset, is_cut=True)
            self._piece.tokens.append(token)
            self._held.popleft()
