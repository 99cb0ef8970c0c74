"""A broker of one's own, for tests and benchmarks: nats-server as a child process."""

import asyncio
import re
from collections import deque
from pathlib import Path

import structlog

from libs.bus.nats_server import BrokerNotStarted, nats_server_command
from services.up.child_process import die_with_parent

READY_TIMEOUT_SECONDS = 20.0
STOP_TIMEOUT_SECONDS = 5.0
ANY_FREE_PORT = -1

_LISTENING = re.compile(rb"Listening for client connections on \S*:(\d+)")
_READY = b"Server is ready"

log = structlog.get_logger()


class NatsServer:
    """One broker that may be started and stopped several times; it keeps its port and its state folder."""

    def __init__(self, state_dir: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """`port` 0: any free one, chosen at the first start."""
        self._state_dir, self._host = state_dir, host
        self.port = port
        """Known after the first start."""
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=8)

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"nats://{self._host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id. Raises BrokerNotStarted."""
        return self._running().pid

    async def start(self) -> None:
        """Returns when it takes connections, at once if it does already. Raises BrokerNotStarted with its
        last words."""
        if self._process is not None and self._process.returncode is None:
            return
        await self.stop()
        command = nats_server_command(self._state_dir, host=self._host, port=self.port or ANY_FREE_PORT)
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
            start_new_session=True,  # the terminal's Ctrl-C is for those who need the broker to end in order
        )
        try:
            async with asyncio.timeout(READY_TIMEOUT_SECONDS):
                is_ready = await self._read_until_ready(self._process)
        except TimeoutError:
            is_ready = False
        except BaseException:
            await self.stop()
            raise
        if not is_ready:
            await self.stop()
            raise BrokerNotStarted(
                "nats-server did not become ready; it said: " + " | ".join(self._last_lines)
            )
        self._output = asyncio.create_task(self._read_on(self._process), name="nats-server-output")

    async def wait_ended(self) -> int:
        """Its exit code, negative for a signal, once it has ended."""
        return await self._running().wait()

    async def stop(self) -> None:
        """Ask it to end, kill it when it does not. Idempotent."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._output is not None:
            await self._output
        self._process = self._output = None

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise BrokerNotStarted("nats-server has not been started")
        return self._process

    async def _read_until_ready(self, process: asyncio.subprocess.Process) -> bool:
        """False when it ended first."""
        while line := await _line_of(process):
            self._note(line)
            if found := _LISTENING.search(line):
                self.port = int(found.group(1))
            if _READY in line:
                return True
        return False

    async def _read_on(self, process: asyncio.subprocess.Process) -> None:
        """A pipe that nobody reads would stop it."""
        while line := await _line_of(process):
            self._note(line)

    def _note(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self._last_lines.append(text)
        if "[WRN]" in text or "[ERR]" in text or "[FTL]" in text:
            log.warning("broker_complained", line=text)


async def _line_of(process: asyncio.subprocess.Process) -> bytes:
    """Empty at the end of its output."""
    return await process.stderr.readline() if process.stderr is not None else b""
