"""Workers change their role under load: no stream ends early, and each process goes on under its own id."""

import asyncio
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from black_box import MODEL, Mesh, until
from libs.bus.messages.migration import FlipRole, MoveAccepted
from libs.bus.nats_bus import NatsBus

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STREAMS = 6
MAX_TOKENS = 32
FLIP_TIMEOUT_SECONDS = 180.0

KIND = {"prefill": "prefill_worker", "decode": "decode_worker"}
WORK = {"prefill": "kvmesh_prompt_tokens_total", "decode": "kvmesh_generation_tokens_total"}


def _prompt(i: int) -> str:
    return f"Letter {i}. Dear friend, " + "today I walked along the river and saw many birds. " * (1 + i % 5)


async def _stream(client: openai.AsyncOpenAI, prompt: str) -> str:
    """The whole text. Raises openai.APIError where the mesh refuses, or ends the stream early."""
    text = ""
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        text += chunk.choices[0].text
    return text


class Load:
    """Streams without a pause, each compared with what it must say."""

    def __init__(self, client: openai.AsyncOpenAI, expected: list[str]) -> None:
        self._client, self._expected = client, expected
        self.is_over = False
        self.num_streams = 0

    async def run(self, i: int) -> None:
        while not self.is_over:
            assert await _stream(self._client, _prompt(i)) == self._expected[i]
            self.num_streams += 1


@asynccontextmanager
async def load_on(mesh: Mesh) -> AsyncIterator[Load]:
    client = mesh.async_client()
    expected = await asyncio.gather(*(_stream(client, _prompt(i)) for i in range(NUM_STREAMS)))
    load = Load(client, expected)
    async with asyncio.TaskGroup() as group:
        for i in range(NUM_STREAMS):
            group.create_task(load.run(i))
        try:
            yield load
        finally:
            load.is_over = True
    await client.close()


@asynccontextmanager
async def bus_of(mesh: Mesh) -> AsyncIterator[NatsBus]:
    found = re.search(r"ready at (nats://\S+)", mesh.output.read_text())
    assert found
    bus = await NatsBus.connect(found[1])
    try:
        yield bus
    finally:
        await bus.close()


async def _wait(happened: Callable[[], Any], what: str) -> Any:
    return await asyncio.to_thread(until, happened, timeout_seconds=FLIP_TIMEOUT_SECONDS, what=what)


async def flip(mesh: Mesh, bus: NatsBus, name: str, role: str) -> dict[str, Any]:
    """Order it, see it drain, and wait for the new worker; returns its presence."""
    before = await asyncio.to_thread(mesh.service, name)
    begun = time.monotonic()
    answer = await bus.request(FlipRole(), to=before["incarnation"], timeout_seconds=10)
    assert isinstance(answer, MoveAccepted), answer

    def now() -> list[dict[str, Any]]:
        return [s for s in mesh.services() if s["name"] == name]

    def drains() -> bool:
        return any(s["detail"] == f"becoming a {role} worker" for s in now()) or serves()

    def serves() -> bool:
        return any(s["kind"] == KIND[role] and s["state"] == "ready" for s in now())

    await _wait(drains, f"{name} says what it becomes")
    await _wait(serves, f"{name} serves as a {role} worker")
    print(f"{name} is a {role} worker after {time.monotonic() - begun:.1f} s")
    (after,) = await asyncio.to_thread(now)
    assert (after["pid"], after["link_address"] != "") == (before["pid"], role == "decode")
    assert after["incarnation"] != before["incarnation"]
    return after


def _metric(presence: dict[str, Any], stem: str) -> float:
    """One figure of one worker."""
    with urllib.request.urlopen(presence["http_address"] + "/metrics", timeout=5) as response:
        found = re.search(rf"^{stem}(?:{{[^}}]*}})? (\S+)$", response.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("name", "role", "other"), [("prefill-1", "prefill", "decode"), ("decode-1", "decode", "prefill")]
)
async def test_a_worker_becomes_one_of_the_other_kind_and_comes_back_while_streams_run(
    double_mesh: Mesh, name: str, role: str, other: str
) -> None:
    mesh = double_mesh
    others = {s["name"]: s["incarnation"] for s in mesh.services() if s["name"] != name}
    async with bus_of(mesh) as bus, load_on(mesh) as load:
        for num_flips, becomes in enumerate((other, role), start=1):
            after = await flip(mesh, bus, name, becomes)
            assert _metric(after, "kvmesh_role_flips_total") == num_flips
            await _wait(
                lambda w=after, b=becomes: _metric(w, WORK[b]) > 0, f"{name} is given work as {becomes}"
            )
    print(f"{load.num_streams} streams, each with the right text")
    assert load.num_streams >= NUM_STREAMS
    await asyncio.to_thread(mesh.wait_idle)
    assert {s["name"]: s["incarnation"] for s in mesh.services() if s["name"] != name} == others
    log = (Path(mesh.state_dir) / "logs" / f"{name}.log").read_text()
    assert log.count('"event": "role_flip_begun"') == 2
