"""Real child processes, small ones: started, restarted, ended in order, killed."""

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.up.mesh import EXIT_KILLED, Mesh, Program
from services.up.supervision import EXIT_BAD_SETTINGS

SAYS_UP = """
import json, os, signal, sys
def say(event):
    print(json.dumps({"event": event, "level": "error"}), flush=True)
"""
PATIENT = f"""{SAYS_UP}
def end(*_):
    say("closed")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say(f"up {{os.getpid()}}")
while True:
    signal.pause()
"""
STUBBORN = f"""{SAYS_UP}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("up")
while True:
    signal.pause()
"""


@dataclass
class Said:
    """A display that remembers, and lets a test wait for words."""

    lines: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def line(self, name: str, said: str, *, style: str = "") -> None:
        self.lines.append(f"{name}: {said}")
        self.changed.set()

    def text(self, text: str) -> None:
        self.line("", text)

    def busy(self, name: str, detail: str) -> None:
        if detail:
            self.line(name, detail)

    def close(self) -> None: ...

    def about(self, start: str) -> list[str]:
        return [line for line in self.lines if line.startswith(start)]

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not happened():
                self.changed.clear()
                await self.changed.wait()


def program(name: str, code: str, stage: int = 0) -> Program:
    return Program(name, (sys.executable, "-c", code), stage)


def mesh_of(said: Said, log_dir: Path, *programs: Program, drain_timeout_seconds: float = 20) -> Mesh:
    return Mesh(programs, os.environ, said, log_dir, drain_timeout_seconds=drain_timeout_seconds)


async def test_children_end_stage_by_stage_and_up_ends_with_0(tmp_path: Path) -> None:
    said = Said()
    mesh = mesh_of(said, tmp_path, program("last", PATIENT, 1), program("first", PATIENT, 0))
    running = asyncio.create_task(mesh.run())
    await said.until(lambda: said.about("first: up") and said.about("last: up"))
    mesh.ask_stop()
    assert await running == 0
    ends = [line for line in said.lines if line.endswith(("ended", "closed"))]
    assert ends == ["first: closed", "first: ended", "last: closed", "last: ended"]


async def test_a_killed_child_is_named_and_started_again(tmp_path: Path) -> None:
    said = Said()
    mesh = mesh_of(said, tmp_path, program("decode-0", PATIENT))
    running = asyncio.create_task(mesh.run())
    await said.until(lambda: said.about("decode-0: up"))
    pid = int(said.about("decode-0: up")[0].split()[-1])
    assert mesh.is_ours("decode-0", pid)
    deaths: list[tuple[str, int]] = []
    mesh.on_death(lambda name, dead: deaths.append((name, dead)))
    os.kill(pid, signal.SIGKILL)
    await said.until(lambda: len(said.about("decode-0: up")) == 2)
    assert deaths == [("decode-0", pid)]
    assert any("killed by SIGKILL; restarting in 0.5 s" in line for line in said.lines)
    assert not mesh.is_ours("decode-0", pid)
    mesh.ask_stop()
    assert await running == 0


async def test_last_words_of_a_crash_are_shown(tmp_path: Path) -> None:
    said = Said()
    mesh = mesh_of(said, tmp_path, program("router", "raise RuntimeError('no such thing')"))
    running = asyncio.create_task(mesh.run())
    await said.until(lambda: any("RuntimeError: no such thing" in line for line in said.lines))
    await said.until(lambda: any("exit code 1; restarting" in line for line in said.lines))
    mesh.ask_stop()
    assert await running == 0


async def test_a_service_that_refuses_its_settings_ends_all_with_2(tmp_path: Path) -> None:
    said = Said()
    refusing = program(
        "router", "import sys; print('router: unknown flag --prot', file=sys.stderr); sys.exit(2)"
    )
    exit_code = await mesh_of(said, tmp_path, program("nats", PATIENT, 3), refusing).run()
    assert exit_code == EXIT_BAD_SETTINGS
    assert "router: router: unknown flag --prot" in said.lines


async def test_a_second_stop_kills_whoever_does_not_end(tmp_path: Path) -> None:
    said = Said()
    mesh = mesh_of(said, tmp_path, program("stuck", STUBBORN))
    running = asyncio.create_task(mesh.run())
    await said.until(lambda: said.about("stuck: up"))
    mesh.ask_stop()
    await said.until(lambda: "stuck: draining" in said.lines)
    mesh.ask_stop()
    assert await running == EXIT_KILLED


async def test_errors_among_a_childs_log_lines_are_shown_while_it_runs(tmp_path: Path) -> None:
    said = Said()
    event = '{"event": "link_lost", "level": "error", "peer": "p1"}'
    mesh = mesh_of(said, tmp_path, program("decode-0", f"print({event!r}, flush=True)\n{PATIENT}"))
    running = asyncio.create_task(mesh.run())
    await said.until(lambda: "decode-0: link_lost peer=p1" in said.lines)
    mesh.ask_stop()
    assert await running == 0


async def test_what_a_dead_child_had_started_does_not_outlive_it(tmp_path: Path) -> None:
    said = Said()
    code = (
        "import os, subprocess, sys\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(grandchild.pid, flush=True)\n"
        "os._exit(1)\n"
    )
    mesh = mesh_of(said, tmp_path, program("kv_store", code))
    running = asyncio.create_task(mesh.run())
    await said.until(lambda: any("restarting" in line for line in said.lines))
    grandchild = int((tmp_path / "kv_store.log").read_text().split()[0])
    mesh.ask_stop()
    await running
    assert ends_within(grandchild, 10)


def ends_within(pid: int, timeout_seconds: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_seconds)[0])
    finally:
        os.close(handle)


async def test_a_program_that_cannot_be_run_is_a_death_like_any_other(tmp_path: Path) -> None:
    said = Said()
    mesh = mesh_of(said, tmp_path, Program("ghost", (str(tmp_path / "nothing"),), 0))
    running = asyncio.create_task(mesh.run())
    await said.until(lambda: any("ghost: died: exit code 126" in line for line in said.lines))
    mesh.ask_stop()
    assert await running == 0
