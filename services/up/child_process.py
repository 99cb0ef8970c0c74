"""One run of one program: started in a session of its own, its output read, its end awaited."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from services.up.child_output import ChildOutput

_OUTPUT_GRACE_SECONDS = 1.0
"""A dead child's own children may hold its output open: what has not come by then is left."""


class ChildProcess:
    """Made by `start_child`."""

    def __init__(self, process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
        self._process = process
        self._reading = reading

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, negative for a signal, once its output has been read."""
        code = await self._process.wait()
        self.kill()  # what it started itself must not outlive it
        await asyncio.wait({self._reading}, timeout=_OUTPUT_GRACE_SECONDS)
        self._reading.cancel()
        return code

    def terminate(self) -> None:
        """Ask it to end. Harmless when it has."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and all that it started, at once. Harmless when they have."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def start_child(
    command: Sequence[str], environ: Mapping[str, str], output: ChildOutput, show: Callable[[str], None]
) -> ChildProcess:
    """Start `command`; its output goes to `output`, errors among it to `show`.

    A session of its own keeps the terminal's Ctrl-C from it: `up` alone decides who ends when. It does not
    outlive this process.
    """
    reader, writer = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writer,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return ChildProcess(
        process, asyncio.create_task(_read(reader, output, show), name=f"output-{process.pid}")
    )


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In the child, before it becomes the program: have the kernel end it when its parent dies (on Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _read(descriptor: int, output: ChildOutput, show: Callable[[str], None]) -> None:
    # Our own pipe, not asyncio's: with that, `wait` would last until the last grandchild has closed it.
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        while data := await stream.read(65536):
            for said in output.feed(data):
                show(said)
    finally:
        transport.close()


def exit_words(code: int) -> str:
    """An exit code for people: "exit code 1", "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
