"""`up` as a person meets it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from black_box import Mesh, child_of, until

pytestmark = pytest.mark.system
MESH = "smollm2"


def test_up_names_each_service_and_prints_a_curl_line_that_works(mesh: Mesh) -> None:
    said: str = until(
        lambda: mesh.output.read_text() if "curl " in mesh.output.read_text() else "",
        timeout_seconds=30,
        what="the curl line",
    )
    for name in ("gateway", "router-0", "store-0", "prefill-0", "decode-0"):
        assert name in said
    curl = said[said.index("curl ") :].strip().removesuffix("\\")
    answer = subprocess.run(["bash", "-c", _first_command(curl)], capture_output=True, timeout=60, check=True)
    assert "choices" in json.loads(answer.stdout)


def _first_command(text: str) -> str:
    """A shell command may go over several lines, each but the last ending in a backslash."""
    lines: list[str] = []
    for line in text.splitlines():
        lines.append(line)
        if not line.rstrip().endswith("\\"):
            break
    return "\n".join(lines)


def test_kvmesh_chat_and_status_print_json(mesh: Mesh) -> None:
    def kvmesh(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "services.cli", *arguments, "--url", mesh.url, "--output", "json"]
        return dict(json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout))

    answer = kvmesh("chat", "Say hello.", "--max-tokens", "8")
    assert answer["text"]
    status = kvmesh("status")
    assert {"gateway", "router"} <= {s["kind"] for s in status["services"]}  # type: ignore[attr-defined]


def test_a_restarted_broker_is_found_again_by_everybody(mesh: Mesh) -> None:
    before = {s["name"]: s["incarnation"] for s in mesh.services()}
    client = mesh.client()
    expected = (
        client.completions.create(model=mesh.model, prompt="Snow is", temperature=0, max_tokens=8)
        .choices[0]
        .text
    )
    os.kill(child_of(mesh.process.pid, "nats-server"), signal.SIGKILL)

    def answers() -> bool:
        try:
            reply = client.completions.create(model=mesh.model, prompt="Snow is", temperature=0, max_tokens=8)
        except Exception:  # noqa: BLE001 - any refusal is fine until the broker is back
            return False
        return reply.choices[0].text == expected

    until(answers, timeout_seconds=60, what="the mesh answers after its broker was killed")
    until(
        lambda: {s["name"]: s["incarnation"] for s in mesh.services()} == before,
        timeout_seconds=30,
        what="every service is seen again, none was restarted",
    )


def test_a_port_in_use_is_one_clear_line_before_anything_starts(mesh: Mesh, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.up", "--port", str(mesh.port), "--state-dir", str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert str(mesh.port) in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr + refused.stdout


def test_an_unknown_model_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.up", "--model", "no-such-model", "--state-dir", str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "no-such-model" in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr + refused.stdout


def test_nothing_outlives_an_up_that_was_killed(tmp_path: Path, tiny_model: str) -> None:
    mesh = Mesh(
        tmp_path, "--dtype", "float32", "--num-blocks", "64", "--max-model-len", "512", model=tiny_model
    )
    pids: list[int] = []
    try:
        mesh.wait_ready()
        pids = [service["pid"] for service in mesh.services()]
        mesh.process.kill()
        until(
            lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids),
            timeout_seconds=30,
            what="all services are gone",
        )
    finally:
        mesh.process.wait(timeout=10)
        for pid in pids:
            if Path(f"/proc/{pid}/exe").exists():
                os.kill(pid, signal.SIGKILL)
