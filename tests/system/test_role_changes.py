"""Workers change their role in place, under load: no stream ends early, and the new work comes at once."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from black_box import Mesh, until

pytestmark = pytest.mark.system

MESH = "double"

NUM_STREAMS = 6
MAX_TOKENS = 32
CHANGE_TIMEOUT_SECONDS = 180.0

KIND = {"prefill": "prefill_worker", "decode": "decode_worker", "both": "decode_worker"}
WORK = {
    "prefill": "kvmesh_prompt_tokens_total",
    "decode": "kvmesh_generation_tokens_total",
    "both": "kvmesh_generation_tokens_total",
}


def _prompt(i: int) -> str:
    return f"Letter {i}. Dear friend, " + "today I walked along the river and saw many birds. " * (1 + i % 5)


async def _stream(client: openai.AsyncOpenAI, model: str, prompt: str) -> str:
    """The whole text. Raises openai.APIError where the mesh refuses, or ends the stream early."""
    text = ""
    stream = await client.completions.create(
        model=model,
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

    def __init__(self, client: openai.AsyncOpenAI, model: str, expected: list[str]) -> None:
        self._client, self._model, self._expected = client, model, expected
        self.is_over = False
        self.num_streams = 0

    async def run(self, i: int) -> None:
        while not self.is_over:
            assert await _stream(self._client, self._model, _prompt(i)) == self._expected[i]
            self.num_streams += 1


@asynccontextmanager
async def load_on(mesh: Mesh) -> AsyncIterator[Load]:
    client = mesh.async_client()
    expected = await asyncio.gather(*(_stream(client, mesh.model, _prompt(i)) for i in range(NUM_STREAMS)))
    load = Load(client, mesh.model, expected)
    async with asyncio.TaskGroup() as group:
        for i in range(NUM_STREAMS):
            group.create_task(load.run(i))
        try:
            yield load
        finally:
            load.is_over = True
    await client.close()


def change(mesh: Mesh, name: str, role: str) -> dict[str, Any]:
    """As an operator does it; returns the worker's presence when it is ready in that role."""
    before = mesh.service(name)
    command = [sys.executable, "-m", "services.cli", "role", name, role, "--wait", "--url", mesh.url]
    key = (mesh.state_dir / "admin.key").read_text().strip()
    said = subprocess.run(
        command,
        env={**os.environ, "KVMESH_ADMIN_KEY": key},
        capture_output=True,
        text=True,
        timeout=CHANGE_TIMEOUT_SECONDS,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    print(said.stdout.strip())
    after = mesh.service(name)
    assert (after["kind"], after["runs_prompts"]) == (KIND[role], role == "both")
    assert [after[key] for key in ("pid", "incarnation")] == [before[key] for key in ("pid", "incarnation")]
    return after


def idle_seconds(mesh: Mesh, name: str) -> list[float]:
    """Of each change of role, from the end of the last answer until the worker was ready again."""
    lines = (mesh.state_dir / "logs" / f"{name}.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["idle_seconds"] for event in events if event.get("event") == "role_changed"]


@pytest.mark.parametrize(
    ("name", "role", "other"), [("prefill-1", "prefill", "decode"), ("decode-1", "decode", "both")]
)
async def test_a_worker_changes_its_role_and_comes_back_while_streams_run(
    mesh: Mesh, name: str, role: str, other: str
) -> None:
    async with load_on(mesh) as load:
        for becomes in (other, role):
            await asyncio.to_thread(change, mesh, name, becomes)
            stem = WORK[becomes]
            worked = mesh.metric_of(name, stem)
            await asyncio.to_thread(
                until,
                lambda s=stem, w=worked: mesh.metric_of(name, s) > w,
                timeout_seconds=CHANGE_TIMEOUT_SECONDS,
                what=f"{name} is given work as {becomes}",
            )
    print(f"{load.num_streams} streams, each with the right text")
    assert load.num_streams >= NUM_STREAMS
    await asyncio.to_thread(mesh.wait_idle)
    assert mesh.metric_of(name, "kvmesh_role_flips_total") == 2
    idle = idle_seconds(mesh, name)
    print(f"{name} took no work for {idle} s after its last answer")
    assert len(idle) == 2
    assert max(idle) <= 1.0
