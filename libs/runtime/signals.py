"""What SIGTERM and SIGINT mean, and what happens when the parent process is gone."""

import asyncio
import ctypes
import os
import signal
import sys
import threading

import structlog

from libs.runtime.life import CLOSE_TIMEOUT_SECONDS, Stop

PARENT_VARIABLE = "KVMESH_PARENT_PID"
"""Set by `up` for its children: whoever finds it set does not outlive that process."""

_PR_SET_PDEATHSIG = 1

log = structlog.get_logger()


def stop_on_signals(stop: Stop, *, drain_timeout_seconds: float, parent_pid: int = 0) -> None:
    """The first SIGTERM or SIGINT asks the service to end, the second ends the process at once."""
    loop = asyncio.get_running_loop()

    def asked(number: signal.Signals) -> None:
        if stop.asked.is_set():
            log.warning("ended_at_once", signal=number.name)
            os._exit(128 + number)
        stop.skip_drain = parent_pid != 0 and os.getppid() != parent_pid
        log.info("stop_asked", signal=number.name, parent_gone=stop.skip_drain)
        _end_at_latest_after(drain_timeout_seconds + CLOSE_TIMEOUT_SECONDS + 5)
        stop.asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)


def _end_at_latest_after(seconds: float) -> None:
    """Native code that hangs must not keep a process that was asked to end."""
    watchdog = threading.Timer(seconds, os._exit, args=[1])
    watchdog.daemon = True
    watchdog.start()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent dies (Linux); exit now if it is dead already.

    Only Linux can do this; elsewhere `up` ends its children itself whenever it gets the chance.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
