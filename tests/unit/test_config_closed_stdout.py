"""Programs whose reader has had enough, as in `kvmesh --help | head -1`."""

import os
import subprocess
import sys

import pytest


def unread(*command: str) -> tuple[int, str]:
    """How it ends, and what it complains of, where nobody reads its output."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    # Without a buffer argparse itself would meet the broken pipe, and go on as if nothing were.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(write_end, "wb") as unread_end:
        ended = subprocess.run(
            [sys.executable, *command],
            stdout=unread_end,
            stderr=subprocess.PIPE,
            env=environ,
            text=True,
            check=False,
        )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("services.cli", "--help"),
        ("services.cli", "migrate", "--help"),
        ("services.cli", "version"),
        ("services.cli", "up", "--help"),
        ("services.router", "--help"),
    ],
    ids=" ".join,
)
def test_help_that_nobody_reads_ends_without_a_word(words: tuple[str, ...]) -> None:
    assert unread("-m", *words) == (141, "")


MANY_LINES = """
from libs.config.closed_stdout import tolerate_closed_stdout
with tolerate_closed_stdout():
    for number in range(10_000):
        print(number)
    raise SystemExit({code})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_it_makes_no_difference_how_the_program_was_about_to_end(code: int) -> None:
    assert unread("-c", MANY_LINES.format(code=code)) == (141, "")


def test_errors_that_nobody_reads_are_as_silent() -> None:
    both = "import os; os.dup2(1, 2)\nimport sys\n" + MANY_LINES.replace(
        "print(number)", "print(number, file=sys.stderr)"
    )
    assert unread("-c", both.format(code=1)) == (141, "")


def test_who_is_read_ends_as_it_would() -> None:
    command = [sys.executable, "-c", MANY_LINES.format(code=3)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.count("\n"), ended.stderr) == (3, 10_000, "")


def test_without_any_output_there_is_no_reader_to_lose() -> None:
    closed = "import os, sys; os.close(1); sys.stdout = None\n" + MANY_LINES.format(code=3)
    assert unread("-c", closed) == (3, "")
