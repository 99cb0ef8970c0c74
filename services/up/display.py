"""What a person sees: lasting lines, and on a terminal also what each service is busy with while it loads."""

import sys
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_NAME_WIDTH = 13


class Display(Protocol):
    """Where `up` says what happens."""

    def line(self, name: str, said: str, *, style: str = "") -> None:
        """A lasting line about one service."""
        ...

    def text(self, text: str) -> None:
        """Lasting text about the whole mesh."""
        ...

    def busy(self, name: str, detail: str) -> None:
        """What a service is doing now; an empty `detail` ends it."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""
        ...


class PlainDisplay:
    """Lines only, for files and pipes. `on_reader_gone` is called when nobody reads them any more."""

    def __init__(self, on_reader_gone: Callable[[], None]) -> None:
        self._on_reader_gone = on_reader_gone
        self._busy: dict[str, str] = {}

    def line(self, name: str, said: str, *, style: str = "") -> None:
        """Style is for terminals."""
        del style
        self.text(f"{name:<{_NAME_WIDTH}} {said}")

    def text(self, text: str) -> None:
        """As it is, never wrapped: it may be pasted."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            self._on_reader_gone()

    def busy(self, name: str, detail: str) -> None:
        """Each new detail is a line; percentages only every twenty."""
        stem = _without_small_steps(detail)
        if stem and self._busy.get(name) != stem:
            self.line(name, detail)
        self._busy[name] = stem

    def close(self) -> None:
        """Nothing to restore."""


class TerminalDisplay:
    """Lasting lines scroll by above a few lines that change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._busy: dict[str, str] = {}
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)

    def line(self, name: str, said: str, *, style: str = "") -> None:
        """One line, the name in bold."""
        self._console.print(Text.assemble((f"{name:<{_NAME_WIDTH}} ", "bold"), (said, style)))

    def text(self, text: str) -> None:
        """As it is, never wrapped: it may be pasted."""
        self._console.print(Text(text), soft_wrap=True)

    def busy(self, name: str, detail: str) -> None:
        """Shown with a spinner until it ends."""
        if detail:
            self._busy[name] = detail
        else:
            self._busy.pop(name, None)
        rows: list[RenderableType] = [
            Spinner("dots", Text.assemble((f"{n:<{_NAME_WIDTH - 2}} ", "bold"), d))
            for n, d in self._busy.items()
        ]
        if not rows:  # an idle terminal is left alone: people scroll and select
            self._live.stop()
            return
        self._live.start()
        self._live.update(Group(*rows), refresh=True)

    def close(self) -> None:
        """Take the changing lines away."""
        self._live.stop()


def new_display(on_reader_gone: Callable[[], None]) -> Display:
    """For people where standard output is a terminal, else plain lines."""
    if sys.stdout.isatty():
        return TerminalDisplay(Console(highlight=False))
    return PlainDisplay(on_reader_gone)


def _without_small_steps(detail: str) -> str:
    """ "loading 43%" and "loading 57%" are the same step, "loading 61%" is the next."""
    head, percent, _ = detail.partition("%")
    words = head.split(" ")
    if percent and words[-1].isdigit():
        return " ".join([*words[:-1], str(int(words[-1]) // 20)])
    return detail
