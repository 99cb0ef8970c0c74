"""From tokens to text that may be shown: detokenised, cut at stop strings, with its tokens beside it. Pure.

The text is cut where the earliest stop string BEGINS, in whatever pieces it arrives: streamed text and whole
text are the same. Text that may still become a stop string is held back, and so is everything after it.

A token is shown together with the text that it completes; text that may become a stop string is held back
together with its tokens. The texts of all tokens shown, joined, are the text shown: a token that only begins
a character, one that is special, and one behind the cut have an empty text.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from libs.model.tokenizer import Detokenizer
from libs.request.outcome import FinishReason
from libs.request.sampling import TokenLogprobs


class ShownToken(NamedTuple):
    """One token of a text with its place there (`offset`, in characters of the answer)."""

    token_id: int
    text: str
    offset: int
    logprobs: TokenLogprobs | None
    is_cut: bool = False
    """Its text is not what the token says: it ended the sequence, or a stop string cut it."""


@dataclass(slots=True)
class TextDelta:
    """What tokens add to the answer. `tokens` is filled only where log-probabilities are asked for."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    finish: FinishReason | None = None
    """With the last of a sequence."""


class StopStrings:
    """Finds the earliest of `stops` in a text that comes in pieces. `stopped` turns true once and stays."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take the next piece; return what can be given out now. After the stop: always the empty string."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = self._find(text)
        undecided = self._find_beginning(text, before=found)
        if undecided < found:
            self._held = text[undecided:]
            return text[:undecided]
        self.stopped, self._held = found < len(text), ""
        return text[:found]

    def finish(self) -> str:
        """No more text comes: what was held back is given out, or cut where a stop string begins."""
        text, self._held = self._held, ""
        found = self._find(text)
        self.stopped = self.stopped or found < len(text)
        return text[:found]

    def _find(self, text: str) -> int:
        """Where the earliest whole stop string begins; the length of `text` where there is none."""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=len(text))

    def _find_beginning(self, text: str, *, before: int) -> int:
        """Where the earliest end of `text` begins that is a part of a stop string, if before `before`."""
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), before)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, before)
            before = at if at >= 0 else before
        return before


class SequenceText:
    """The text of one sequence. After `stopped` no further token is taken."""

    def __init__(
        self,
        detokenizer: Detokenizer,
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
        self._delta = TextDelta()

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

    def take(self) -> TextDelta:
        """What may be shown since the last call."""
        delta, self._delta = self._delta, TextDelta()
        return delta

    def _take(self, text: str) -> None:
        self._num_chars_in += len(text)
        if self._num_tokens <= self._min_tokens:
            self._give(text)
        elif text:
            self._give(self._stops.push(text))

    def _give(self, text: str) -> None:
        self._delta.text += text
        self._num_chars_out += len(text)

    def _show_tokens(self, *, all_of_them: bool = False) -> None:
        """Move tokens whose text is out to the delta; at the end also the others, cut to what is out."""
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
            self._delta.tokens.append(token)
            self._held.popleft()
