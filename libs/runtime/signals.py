"""SIGTERM and SIGINT, and the death of the parent process."""

import asyncio
import os
import signal
import threading
from collections.abc import Mapping

import structlog

from libs.runtime.life import CLOSE_TIMEOUT_SECONDS, Stop

PARENT_VARIABLE = "KVMESH_PARENT_PID"
"""Set by `up` for its children, which the kernel signals when that process dies."""

log = structlog.get_logger()


class Parent:
    """The `up` that started this process, if one did."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._pid = int(environ.get(PARENT_VARIABLE) or 0)

    @property
    def is_gone(self) -> bool:
        """It died: this process has been handed to another parent. False where nobody named one."""
        return self._pid != 0 and os.getppid() != self._pid


def stop_on_signals(stop: Stop, parent: Parent, *, drain_timeout_seconds: float) -> None:
    """The first SIGTERM or SIGINT asks the service to end, within a bound; the second ends the process at
    once."""
    loop = asyncio.get_running_loop()
    limit_seconds = drain_timeout_seconds + CLOSE_TIMEOUT_SECONDS + 5

    def asked(number: signal.Signals) -> None:
        if stop.asked.is_set():
            log.warning("ended_at_once", signal=number.name)
            os._exit(128 + number)
        stop.skip_drain = parent.is_gone
        end_at_latest_after(limit_seconds, 1)
        stop.asked.set()
        log.info("stop_asked", signal=number.name, parent_gone=stop.skip_drain)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)


def end_at_latest_after(seconds: float, exit_code: int) -> None:
    """Native code that hangs, or a thread that still loads, must not keep a process whose life is over."""
    watchdog = threading.Timer(seconds, os._exit, args=[exit_code])
    watchdog.daemon = True
    watchdog.start()
