"""A decode worker whose prefill worker leaves while KV that it sent is still on its way into the pool."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from workers_mesh import Hosted, WorkersMesh, prompt_of, running_mesh

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.request.outcome import FailureReason


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


class SlowWrites:
    """Holds back KV on its way into the pool of a decode worker until `gate` is set."""

    def __init__(self, decode: Hosted) -> None:
        self.gate, self.num_held = asyncio.Event(), 0
        self._engine = decode.service.engine
        self._write = self._engine.write_blocks
        self._engine.write_blocks = self.write

    async def write(self, *args: Any) -> bool:
        self.num_held += 1
        await self.gate.wait()
        written: bool = await self._write(*args)
        return written


def has_left(decode: Hosted, peer: Hosted) -> bool:
    return decode.service._roster.get(peer.incarnation) is None


async def test_what_a_drained_peer_sent_before_its_good_bye_is_adopted(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    writes = SlowWrites(decode)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    streams = [
        await gateway.begin(gateway.generation(prompt_of(40, seed=n), max_tokens=20), **where)
        for n in range(4)
    ]
    await mesh.until(lambda: writes.num_held > 0)
    await mesh.stop(prefill)
    await mesh.until(lambda: has_left(decode, prefill))
    writes.gate.set()
    for stream in streams:
        await stream.end()
        assert (stream.failure, len(stream.tokens)) == (None, 20)
    await mesh.until(lambda: not decode.service.decode.num_links)
    await mesh.until_idle()


async def test_what_a_drained_peer_never_sent_fails_when_its_link_has_ended(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    writes = SlowWrites(decode)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    sent = await gateway.begin(gateway.generation(prompt_of(40)), **where)
    await mesh.until(lambda: writes.num_held > 0)
    awaited = gateway.generation(prompt_of(30, seed=1))
    gateway.listen(awaited)
    await gateway.reserve(awaited, **where)
    await mesh.stop(prefill)
    await mesh.until(lambda: has_left(decode, prefill))
    writes.gate.set()
    await sent.end()
    assert sent.failure is None
    stream = await gateway.streams[awaited.request_id].end()
    assert stream.failure is FailureReason.PEER_LOST
    await mesh.until_idle()


async def test_a_drained_peer_without_a_link_fails_what_waits_for_it_at_once(mesh: WorkersMesh) -> None:
    gateway, decode = await mesh.gateway(), await mesh.decode()
    peer = Presence(
        kind=ServiceKind.PREFILL_WORKER, name="p", incarnation="gone", state=ServiceState.DRAINING
    )
    await gateway.bus.put_presence("gone", msgspec.msgpack.encode(peer))
    await mesh.until(lambda: decode.service._roster.get("gone") is not None)
    awaited = gateway.generation(prompt_of(30))
    stream = gateway.listen(awaited)
    await gateway.reserve(awaited, prefill="gone", decode=decode.incarnation)
    await gateway.bus.delete_presence("gone")
    await stream.end()
    assert (stream.failure, stream.detail) == (FailureReason.PEER_LOST, "p left the mesh")
