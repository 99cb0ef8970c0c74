"""kvmesh placement, migrate and explain against a real gateway, a coordinator answering on the bus."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_coordinator import (
    HEADS_AWAY,
    LAYERS_AWAY,
    NUM_LAYERS,
    PREFILL,
    Coordinator,
    Owners,
    at_home,
    candidate,
    done,
    hosted,
    order,
    record,
    seen,
    told,
    without_ids,
)
from gateway_mesh import Mesh
from gateway_moves import ADMIN_KEY

from libs.bus.messages.migration import CancelMigration, DenialReason, MigrationDenied
from libs.cost.load import WorkerLoad
from libs.placement.migration import MigrationPhase
from libs.placement.module import heads_of, remote_blocks, whole_layers
from services.cli.__main__ import main

Said = tuple[int, str, str]


@pytest.fixture
async def mesh(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mesh:
    """One that a command finds, with its key."""
    monkeypatch.setenv("KVMESH_URL", mesh.url)
    monkeypatch.setenv("KVMESH_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("KVMESH_ADMIN_KEY", raising=False)
    (tmp_path / "admin.key").write_text(ADMIN_KEY + "\n")
    await mesh.bus.publish(told(at_home(PREFILL)))
    await tell(mesh, told(at_home()))
    return mesh


@pytest.fixture
def kvmesh(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    del mesh

    async def run(*words: str) -> Said:
        capsys.readouterr()
        code = await asyncio.to_thread(main, list(words))
        return code, *capsys.readouterr()

    return run


@asynccontextmanager
async def started(*words: str, stdout: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """`kvmesh` as a program of its own, which does not outlive the block."""
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *words, stdout=stdout, stderr=PIPE
    )
    try:
        yield command
    finally:
        if command.returncode is None:
            command.kill()
            await command.communicate()


async def tell(mesh: Mesh, message: Any) -> None:
    await mesh.bus.publish(message)
    async with mesh.http() as http:
        while True:
            instances = (await http.get("/v1/mesh/placement")).json()["instances"]
            if any(
                i["incarnation"] == message.placement.owner and i["epoch"] == message.placement.epoch
                for i in instances
            ):
                return


async def test_the_placement_is_a_picture(mesh: Mesh, kvmesh: Callable[..., Any]) -> None:
    await mesh.decodes[0].report(WorkerLoad(num_blocks=1200, num_used_blocks=300, block_size=16))
    await mesh.bus.publish(told(at_home(PREFILL), hosted=(hosted(whole_layers(20, 30)),)))
    await tell(mesh, told(LAYERS_AWAY))
    code, out, _ = await kvmesh("placement")
    assert code == 0
    for line in (
        "A decode-0   B prefill-0",
        "decode-0  epoch 1",
        "heads 0-2   AAAAAAAAAAAAAAAAAAAABBBBBBBBBB",
        "layers 20-29 at prefill-0, with their weights (move m1)",
        "hosts layers 20-29 of decode-0 in 64.0 MiB",
        "1200 KV blocks, 19200 tokens; 25% in use",
    ):
        assert line in out
    code, out, _ = await kvmesh("placement", "--output", "json")
    assert json.loads(out)["instances"][0]["layers"][1]["worker"] == "prefill-0"


ASKED: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("--layers", "20:30"), {"module": whole_layers(20, 30), "with_weights": True}),
    (("--layers", "20:30", "--kind", "offload"), {"module": whole_layers(20, 30)}),
    (("--heads", "1,2"), {"module": heads_of(0, NUM_LAYERS, (1, 2))}),
    (("--heads", "0", "--layers", "3:5"), {"module": heads_of(3, 5, (0,))}),
    (("--tokens",), {"module": remote_blocks(NUM_LAYERS)}),
    (("--tokens", "--blocks", "9"), {"module": remote_blocks(NUM_LAYERS), "num_blocks": 9}),
    (("--layers", "0:1", "--expected-epoch", "0"), {"module": whole_layers(0, 1), "with_weights": True,
                                                    "expected_epoch": 0}),
]  # fmt: skip


async def test_each_way_to_ask_asks_for_what_it_says(
    mesh: Mesh, owners: Owners, kvmesh: Callable[..., Any]
) -> None:
    for words, meant in ASKED:
        code, out, err = await kvmesh("migrate", "decode-0", "--to", "prefill-0", *words)
        assert (code, err) == (0, "")
        assert f"move {owners.asked[-1].move_id} begins" in out
        assert without_ids([owners.asked.pop()]) == [order(**meant)]
    await tell(mesh, told(LAYERS_AWAY))
    assert (await kvmesh("migrate", "decode-0", "--return", "m1"))[0] == 0
    assert (await kvmesh("migrate", "--return", "m1"))[0] == 0
    assert without_ids(owners.asked) == [order(host="", expected_epoch=1, returned_move_id="m1")] * 2


async def test_a_move_that_is_waited_for_is_told_phase_by_phase(
    owners: Owners, kvmesh: Callable[..., Any]
) -> None:
    owners.begins = done()
    words = ("migrate", "decode-0", "--to", "prefill-0", "--layers", "20:30", "--wait")
    code, out, _ = await kvmesh(*words)
    assert code == 0
    assert out.splitlines() == [
        f"move {owners.asked[0].move_id}: layers 20-29 of decode-0 to prefill-0 (migrate)",
        "  reserving       0.02 s",
        "  copying         0.90 s  KV 12.0 MiB, weights 70.0 MiB",
        "  catching up     0.30 s  2 rounds",
        "  switching       0.01 s  pause 8.3 ms",
        "done in 1.50 s; decode-0: 800 -> 1200 (+50%) KV blocks, epoch 1",
    ]
    code, out, _ = await kvmesh(*words, "--output", "json")
    assert json.loads(out)["num_blocks_after"] == 1200


async def test_a_move_that_fails_says_why_in_one_line(owners: Owners, kvmesh: Callable[..., Any]) -> None:
    owners.begins = record(MigrationPhase.FAILED, error="prefill-0 has no room")
    code, out, err = await kvmesh("migrate", "decode-0", "--to", "prefill-0", "--layers", "20:30", "--wait")
    assert code == 1
    assert err == f"kvmesh: move {owners.asked[0].move_id} failed: prefill-0 has no room\n"
    assert "done" not in out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
async def test_who_stops_waiting_is_told_what_goes_on_and_how_to_cancel_it(
    owners: Owners, number: signal.Signals, code: int
) -> None:
    owners.begins = record(host_name="prefill-0", instance_name="decode-0")
    words = ("migrate", "decode-0", "--to", "prefill-0", "--layers", "20:30", "--wait")
    async with asyncio.timeout(30), started(*words, stdout=PIPE) as command:
        assert command.stdout is not None
        assert b": layers 20-29 of decode-0" in await command.stdout.readline()
        command.send_signal(number)
        _, said = await command.communicate()
    assert command.returncode == code
    (line,) = said.decode().splitlines()
    (asked,) = owners.asked  # nothing was cancelled
    assert line.startswith(f"move {asked.move_id} goes on without this command")
    assert f"kvmesh migrate --cancel {asked.move_id}" in line


@pytest.mark.parametrize(
    "words",
    [("placement",), ("explain",), ("status",), ("migrate", "--list"), ("placement", "--output", "json")],
    ids=" ".join,
)
async def test_a_command_that_nobody_reads_ends_without_a_word(
    mesh: Mesh, coordinator: Coordinator, words: tuple[str, ...]
) -> None:
    coordinator.rounds = [seen(9, candidates=(candidate(),)), seen(8)]
    await tell(mesh, told(HEADS_AWAY, moves=(done(),)))
    read_end, write_end = os.pipe()
    os.close(read_end)
    async with started(*words, stdout=write_end) as command:
        os.close(write_end)
        _, said = await command.communicate()
    assert (command.returncode, said) == (141, b"")


async def test_a_move_whose_reader_has_gone_goes_on_and_it_is_said_how_to_cancel_it(
    owners: Owners,
) -> None:
    owners.begins = record(host_name="prefill-0", instance_name="decode-0")
    words = ("migrate", "decode-0", "--to", "prefill-0", "--layers", "20:30", "--wait")
    read_end, write_end = os.pipe()
    async with started(*words, stdout=write_end) as command:
        os.close(write_end)
        assert b": layers 20-29" in await asyncio.to_thread(os.read, read_end, 100)
        os.close(read_end)
        (asked,) = owners.asked
        await owners.tell(done(move_id=asked.move_id))
        _, said = await command.communicate()
    assert command.returncode == 141
    assert said.startswith(f"move {asked.move_id} goes on without this command".encode())
    assert said.count(b"\n") == 1


async def test_a_refusal_is_one_line(owners: Owners, kvmesh: Callable[..., Any]) -> None:
    owners.answer = MigrationDenied(
        reason=DenialReason.STALE_EPOCH, detail="the placement has epoch 4", epoch=4
    )
    code, out, err = await kvmesh("migrate", "decode-0", "--to", "prefill-0", "--layers", "20:30")
    assert (code, out, err) == (1, "", "kvmesh: the placement has epoch 4 (HTTP 409)\n")


async def test_without_a_coordinator_it_is_said_how_to_start_one(kvmesh: Callable[..., Any]) -> None:
    code, _, err = await kvmesh("explain")
    assert code == 1
    assert "kvmesh up --coordinators 1" in err
    assert err.count("\n") == 1


async def test_moves_are_listed_and_one_cancelled(
    mesh: Mesh, owners: Owners, kvmesh: Callable[..., Any]
) -> None:
    assert (await kvmesh("migrate", "--list"))[1] == "There was no move yet.\n"
    failed = {"error": "no room", "num_blocks_before": 2912, "num_blocks_after": 2912}
    moves = (
        record(
            move_id="m2", num_total_bytes=80 << 20, num_weight_bytes=20 << 20, started_unix_seconds=1003.0
        ),
        record(MigrationPhase.FAILED, move_id="m0", started_unix_seconds=1002.0, **failed),
        done(),
    )
    await tell(mesh, told(HEADS_AWAY, moves=moves))
    _, out, _ = await kvmesh("migrate", "--list")
    lines = [line for line in out.splitlines() if not line.startswith("  ")]
    assert [(line.split()[0], line.split()[2]) for line in lines] == [
        ("m2", "copying"),
        ("m0", "failed"),
        ("m1", "done"),
    ]
    assert "  25% of 80.0 MiB: KV 0.0 MiB, weights 20.0 MiB\n" in out
    assert "  2912 KV blocks as before\n  no room\n" in out
    assert out.count("blocks") == 2, "of the move under way they are not known yet"
    assert "  1.50 s, pause 8.3 ms, KV 12.0 MiB, weights 70.0 MiB, 800 -> 1200 (+50%) KV blocks\n" in out
    _, out, _ = await kvmesh("migrate", "--list", "--output", "json")
    assert len(json.loads(out)["data"]) == 3
    code, out, _ = await kvmesh("migrate", "--cancel", "m2")
    assert (code, owners.asked) == (0, [CancelMigration(move_id="m2")])
    assert out == "move m2 is rolled back\n"


async def test_the_loop_is_explained(coordinator: Coordinator, kvmesh: Callable[..., Any]) -> None:
    coordinator.rounds = [seen(9, candidates=(candidate(),), move_id="m1"), seen(8), seen(7)]
    code, out, _ = await kvmesh("explain", "--rounds", "7")
    assert code == 0
    assert out.index("rounds 7-8") < out.index("round 9")
    _, out, _ = await kvmesh("explain", "--output", "json")
    assert json.loads(out)["rounds"][0]["number"] == 9


# Whose key


async def test_a_wrong_key_is_told_where_the_right_one_is(
    mesh: Mesh, owners: Owners, kvmesh: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tell(mesh, told(HEADS_AWAY, moves=(record(),)))
    words = ("migrate", "--cancel", "m1")
    for key in ("wrong", "schlüssel"):
        code, _, err = await kvmesh(*words, "--admin-key", key)
        assert code == 1
        assert "the admin key is needed: --admin-key or $KVMESH_ADMIN_KEY" in err
    (tmp_path / "admin.key").unlink()
    assert (await kvmesh(*words))[0] == 1
    assert owners.asked == []
    monkeypatch.setenv("KVMESH_ADMIN_KEY", ADMIN_KEY)
    assert (await kvmesh(*words))[0] == 0


async def test_reads_show_no_admin_key(monkeypatch: pytest.MonkeyPatch, kvmesh: Callable[..., Any]) -> None:
    shown: list[str] = []
    send = httpx.Client.send

    def heard(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        shown.append(request.headers.get("authorization", ""))
        return send(self, request, **options)

    monkeypatch.setattr(httpx.Client, "send", heard)
    await kvmesh("placement")
    await kvmesh("migrate", "--list")
    assert shown == ["", ""]
