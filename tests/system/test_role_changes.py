"""Workers change their role in place, under load: no stream ends early, and the new work comes at once."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from mesh_moves import load_on

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


def prompts() -> list[str]:
    river = "today I walked along the river and saw many birds. "
    return [f"Letter {i}. Dear friend, " + river * (1 + i % 5) for i in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def expected(reference: Callable[[list[str], int], list[str]]) -> list[str]:
    return reference(prompts(), MAX_TOKENS)


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
    mesh: Mesh, expected: list[str], name: str, role: str, other: str
) -> None:
    async with load_on(mesh, prompts(), expected, MAX_TOKENS, NUM_STREAMS) as load:
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
    print(f"{load.num_right} streams, each with the right text")
    assert (load.refused, load.errors) == ([], [])
    assert load.num_right >= NUM_STREAMS
    await asyncio.to_thread(mesh.wait_idle)
    assert mesh.metric_of(name, "kvmesh_role_flips_total") == 2
    idle = idle_seconds(mesh, name)
    print(f"{name} took no work for {idle} s after its last answer")
    assert len(idle) == 2
    assert max(idle) <= 1.0
