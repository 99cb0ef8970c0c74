"""What tests share: limits, virtual time, examples of properties, Triton's interpreter without a GPU."""

import asyncio
import os
import selectors
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    # Triton looks when it is first imported, which transformers does in another test of the same process.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two processes that compute with all cores each slow each other many times over.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Properties try few examples by default; `--hypothesis-profile=deep` tries many.
settings.register_profile("quick", max_examples=25, stateful_step_count=30, deadline=None)
settings.register_profile("deep", max_examples=400, stateful_step_count=60, deadline=None)
settings.load_profile("quick")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a script. Programs that tests start would ignore the Ctrl-C that they are sent.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LIMIT_SECONDS = {"unit": 20, "contract": 120, "component": 120, "system": 600}
"""A test that takes longer hangs, by the folder it stands in; a mark on a test may say otherwise."""
_DEEP_FACTOR = 16

_STUCK_SECONDS = 20.0
_LEAST_SECONDS = 1e-6


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test gets the limit of its folder."""
    factor = _DEEP_FACTOR if config.getoption("--hypothesis-profile", None) == "deep" else 1
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in _LIMIT_SECONDS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LIMIT_SECONDS[folder] * factor))


class _JumpingSelector(selectors.DefaultSelector):
    """Where nothing is ready, time jumps to the next timer instead of being waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # no timer at all: only a thread or a socket can go on
            ready = super().select(_STUCK_SECONDS)
            if not ready:
                raise RuntimeError("every task waits for something that nothing will bring about")
            return ready
        ready = super().select(0)
        if not ready and timeout > 0:
            # A timer that is less than the clock's rounding away would never come nearer.
            self.now += max(_LEAST_SECONDS, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping costs nothing. For code without real sockets or processes."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@pytest.fixture
def run_virtually() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine to its end in virtual time: `run_virtually(scenario())` in a plain test."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(work)

    return run
