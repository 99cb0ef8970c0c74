"""Standard output that is closed early, as by `kvmesh --help | head -1`: the program ends without a word."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

EXIT_STDOUT_CLOSED = 141
"""As shells report a program that SIGPIPE ended. The signal itself would end it at a broken socket, too."""


@contextmanager
def tolerate_closed_stdout() -> Generator[None]:
    """Within it, a closed standard output ends the program with 141, however it was about to end.

    Output is flushed at its end at the latest: what is left then, the interpreter complains of.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(EXIT_STDOUT_CLOSED) from None


def _discard_output() -> None:
    """Send what is left in the buffers nowhere."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
