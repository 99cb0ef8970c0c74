"""Where a text ends: the incremental search for stop strings. Pure.

The text is cut where the earliest stop string BEGINS, in whatever pieces it arrives: streamed text and whole
text are the same. Text that may still become a stop string is held back, and so is everything after it.
"""

from collections.abc import Sequence


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
