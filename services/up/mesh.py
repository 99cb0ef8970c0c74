"""Runs the children of one mesh from the first start to the last end."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.up.child_output import ChildOutput, LogFile
from services.up.child_process import ChildProcess, exit_words, start_child
from services.up.display import Display
from services.up.supervision import EXIT_BAD_SETTINGS, STABLE_SECONDS, Supervision

KILL_GRACE_SECONDS = 20.0
"""On top of the drain timeout: what a child may take to close before it is killed."""

EXIT_KILLED = 130


@dataclass(frozen=True)
class Program:
    """What to run under a name, and when to end it: the lowest stage first."""

    name: str
    command: Sequence[str]
    stage: int
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Of this program alone, on top of what all get."""


class Mesh:
    """`run` returns when everything has ended. `ask_stop` once drains; asked again, it kills."""

    def __init__(
        self,
        programs: Sequence[Program],
        environ: Mapping[str, str],
        display: Display,
        log_dir: Path,
        *,
        drain_timeout_seconds: float,
        stable_seconds: float = STABLE_SECONDS,
    ) -> None:
        self._programs = {p.name: p for p in programs}
        self._environ = environ
        self._display = display
        self._logs = {p.name: LogFile(log_dir / f"{p.name}.log") for p in programs}
        self._log_dir = log_dir
        self._kill_after_seconds = drain_timeout_seconds + KILL_GRACE_SECONDS
        self._supervision = Supervision({p.name: p.stage for p in programs}, stable_seconds)
        self._processes: dict[str, ChildProcess] = {}
        self._started_at: dict[str, float] = {}
        self._kill_at: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._num_stops_asked = 0
        self._death_listeners: list[Callable[[str, int], None]] = []
        self._exit_code = 0

    async def run(self) -> int:
        """Start, restart and end the children; returns the exit code of `up`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while not self._supervision.is_over:
                    self._wake.clear()
                    for name in self._supervision.due(loop.time()):
                        self._supervision.started(name, loop.time())
                        group.create_task(self._live(name), name=f"child-{name}")
                    self._end_who_is_to_end(loop.time())
                    await self._wait_for_news(loop.time())
        finally:
            for process in self._processes.values():
                process.kill()
            for log in self._logs.values():
                log.close()
        return self._exit_code

    def ask_stop(self) -> None:
        """Drain and end everything in order; asked for the second time, end everything at once."""
        self._num_stops_asked += 1
        if self._num_stops_asked == 1:
            self._display.text("Draining; once more Ctrl-C ends everything at once.")
            self._supervision.stop()
        else:
            self._exit_code = EXIT_KILLED
            for process in self._processes.values():
                process.kill()
        self._wake.set()

    def is_ours(self, name: str, pid: int) -> bool:
        """Whether the child of this name has this process id now: others may share our broker."""
        return name in self._processes and self._processes[name].pid == pid

    def age_seconds(self, name: str) -> float:
        """How long ago the child of this name was last started."""
        return asyncio.get_running_loop().time() - self._started_at[name]

    def on_death(self, listener: Callable[[str, int], None]) -> None:
        """Call `listener` with name and process id after each end of a child."""
        self._death_listeners.append(listener)

    def became_ready(self, name: str) -> None:
        """The child told so itself."""
        self._supervision.ready(name)

    async def _live(self, name: str) -> None:
        """One run of one child."""
        output, program = ChildOutput(self._logs[name].write), self._programs[name]
        try:
            process = await start_child(
                program.command,
                {**self._environ, **program.environ},
                output,
                lambda said: self._display.line(name, said, style="red"),
            )
        except OSError as error:
            self._died(name, 126, [str(error)])
            return
        self._processes[name] = process
        self._started_at[name] = asyncio.get_running_loop().time()
        self._wake.set()  # a stop may have been asked for meanwhile
        code = await process.wait()
        del self._processes[name]
        for listener in self._death_listeners:
            listener(name, process.pid)
        self._died(name, code, list(output.last_plain_lines))

    def _died(self, name: str, code: int, last_lines: Sequence[str]) -> None:
        self._kill_at.pop(name, None)
        self._display.busy(name, "")
        death = self._supervision.died(name, code, asyncio.get_running_loop().time())
        if death.restarts_in_seconds is not None or death.is_fatal:
            for line in last_lines:
                self._display.line(name, line, style="red")
        if death.is_fatal:
            self._exit_code = EXIT_BAD_SETTINGS
            self._supervision.stop()
        elif death.restarts_in_seconds is not None:
            log = self._log_dir / f"{name}.log"
            said = f"died: {exit_words(code)}; restarting in {death.restarts_in_seconds:g} s (see {log})"
            self._display.line(name, said, style="red")
        elif code not in (0, -15):
            self._display.line(name, f"ended: {exit_words(code)}", style="yellow")
        else:
            self._display.line(name, "ended", style="dim")
        self._wake.set()

    def _end_who_is_to_end(self, now: float) -> None:
        for name in self._supervision.to_end():
            if process := self._processes.get(name):
                self._supervision.ending(name)
                self._kill_at[name] = now + self._kill_after_seconds
                self._display.busy(name, "draining")
                process.terminate()
        for name, kill_at in self._kill_at.items():
            if kill_at <= now and (process := self._processes.get(name)):
                self._display.line(name, "did not end in time; killed", style="red")
                process.kill()
        self._kill_at = {n: at for n, at in self._kill_at.items() if at > now}

    async def _wait_for_news(self, now: float) -> None:
        moments = [*self._kill_at.values()]
        if (next_due := self._supervision.next_due()) is not None:
            moments.append(next_due)
        try:
            async with asyncio.timeout(max(0.0, min(moments) - now) if moments else None):
                await self._wake.wait()
        except TimeoutError:
            pass
