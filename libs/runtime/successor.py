"""Living on as another program: the process keeps its id, so that who supervises it sees the same child."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

_DESCRIPTORS = Path("/dev/fd")
_FIRST_OWN_DESCRIPTOR = 3
"""Those before it are standard input, output and error."""

log = structlog.get_logger()


class Successor(msgspec.Struct, frozen=True, kw_only=True):
    """The program that a process becomes when its life is over."""

    module: str
    """As in `python -m`: services.decode_worker."""
    flags: tuple[str, ...]
    title: str
    """For people: "a decode worker"."""
    environ: Mapping[str, str] = {}
    """Variables on top of this process's own."""


def replace_process(successor: Successor) -> NoReturn:
    """Become `successor` now. Everything must be closed: no destructor runs, no other thread goes on.

    Raises OSError where the program cannot be started; this process is then as it was.
    """
    log.info("program_replaced", program=successor.module)
    sys.stdout.flush()
    sys.stderr.flush()
    _keep_standard_streams_only()
    command = [sys.executable, "-m", successor.module, *successor.flags]
    os.execve(sys.executable, command, {**os.environ, **successor.environ})


def _keep_standard_streams_only() -> None:
    """Python's own descriptors do not outlive the replacement anyway; native libraries are less careful."""
    for entry in os.listdir(_DESCRIPTORS):
        if int(entry) >= _FIRST_OWN_DESCRIPTOR:
            with suppress(OSError):  # the one that this very listing had
                os.set_inheritable(int(entry), False)
