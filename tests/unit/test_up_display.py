"""What `up` shows: lines for files, changing lines for terminals."""

import io
import sys

import pytest
from rich.console import Console

from services.up.display import PlainDisplay, TerminalDisplay, new_display


def test_without_a_terminal_there_are_only_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = new_display(lambda: None)
    assert isinstance(display, PlainDisplay)
    display.line("router", "ready")
    display.text("as [it] is")
    display.close()
    assert capsys.readouterr().out == "router        ready\nas [it] is\n"


def test_it_is_told_when_nobody_reads_the_lines_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread(io.StringIO):
        def write(self, s: str) -> int:
            raise BrokenPipeError(len(s))

    num_told: list[None] = []
    display = new_display(lambda: num_told.append(None))
    display.line("router", "ready")
    assert not num_told
    monkeypatch.setattr(sys, "stdout", Unread())
    display.line("store-0", "ready")
    assert num_told


def test_on_a_terminal_lasting_lines_stay_whole_and_the_busy_ones_go() -> None:
    screen = io.StringIO()
    display = TerminalDisplay(Console(file=screen, force_terminal=True, width=40, highlight=False))
    display.busy("decode-0", "loading weights 40%")
    display.line("router", "ready [not markup]")
    display.text("curl " + "x" * 80)
    display.busy("decode-0", "")
    display.busy("decode-0", "")
    display.close()
    display.close()
    shown = screen.getvalue()
    assert "loading weights 40%" in shown
    assert "ready [not markup]" in shown
    assert "x" * 80 in shown, "what may be pasted is never broken"
    assert "\x1b[?25h" in shown, "the cursor is back"
