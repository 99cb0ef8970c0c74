"""A line about the run so far, on stderr: over and over on a terminal, now and then elsewhere."""

import asyncio
import sys
from typing import NoReturn, TextIO

from loadtest.drive import Clock, Drive

_TERMINAL_SECONDS, _PIPE_SECONDS = 0.5, 10.0


async def show_progress(drive: Drive, clock: Clock, out: TextIO = sys.stderr) -> NoReturn:
    """Until it is cancelled."""
    is_terminal = out.isatty()
    while True:
        await asyncio.sleep(_TERMINAL_SECONDS if is_terminal else _PIPE_SECONDS)
        out.write(f"\r\x1b[2K{line(drive, clock())}" if is_terminal else f"{line(drive, clock())}\n")
        out.flush()


def line(drive: Drive, now_seconds: float) -> str:
    """Seconds, requests, tokens, errors."""
    errors = sum(drive.errors.values())
    return (
        f"{now_seconds:6.1f} s  {drive.num_done} done, {drive.num_in_flight} open"
        + (f", {drive.num_waiting} held back" if drive.num_waiting else "")
        + f", {drive.num_tokens} tokens"
        + (f", {errors} errors" if errors else "")
    )
