"""Who reads what a program says may have had enough, as in `kvmesh --help | head -1`: it ends in silence."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

EXIT_READER_GONE = 141
"""As shells tell of a program that SIGPIPE ended. The signal itself would end it at a broken socket, too."""


@contextmanager
def ending_with_its_reader() -> Generator[None]:
    """Within it, a reader that has gone ends the program with 141, however it was about to end.

    What was said is written by its end at the latest: what the interpreter cannot write as it leaves, it
    complains of.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        _write_no_more()
        raise SystemExit(EXIT_READER_GONE) from None


def _write_no_more() -> None:
    """What is left in the buffers of those whose reader has gone goes nowhere."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
