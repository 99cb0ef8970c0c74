"""What only a real broker can do to its clients."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import uvloop
from bus_scene import (
    AT_ONCE_SECONDS,
    TTL_SECONDS,
    Echo,
    Echoed,
    Note,
    ask,
    echo,
    persist,
    presences,
    soon,
    told_until,
    until,
)
from nats_process import NatsServer

from libs.bus.errors import BusError, NotConnected, Overloaded, PresenceUnavailable
from libs.bus.message import PresenceEntry
from libs.bus.nats_bus import PRESENCE_BUCKET, NatsBus
from libs.bus.nats_server import find_nats_server

SILENCE_NOTICED_SECONDS = 10.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, name="test", presence_ttl_seconds=TTL_SECONDS)
    yield bus
    await bus.close()


async def test_connecting_to_nobody_fails_at_once(server: NatsServer) -> None:
    await server.stop()
    with pytest.raises(NotConnected, match=f"no broker at 127.0.0.1:{server.port}.*Connect call failed"):
        await soon(NatsBus.connect(server.url), AT_ONCE_SECONDS)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {broken\r\n"])
async def test_connecting_to_what_is_no_broker_fails_within_seconds(greeting: bytes) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    before = asyncio.all_tasks()
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as stranger:
        port = stranger.sockets[0].getsockname()[1]
        with pytest.raises(NotConnected, match=str(port)):
            await soon(NatsBus.connect(f"nats://127.0.0.1:{port}"))
    await until(lambda: asyncio.all_tasks() <= before)


async def publish_much(bus: NatsBus) -> None:
    """More than the sockets hold and than may wait in the bus."""
    for _ in range(64):
        await soon(bus.publish(Note(text="x" * 1_000_000)), 2 * AT_ONCE_SECONDS)


async def test_a_frozen_broker_is_noticed_refuses_more_than_fits_and_is_found_again(
    server: NatsServer, bus: NatsBus
) -> None:
    await bus.serve(Echo, echo)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Overloaded, match="wait for the broker"):
            await publish_much(bus)
        await until(lambda: not bus.is_connected, SILENCE_NOTICED_SECONDS)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await persist(lambda: ask(bus)) == Echoed("hello")


async def test_a_connection_that_the_broker_ends_with_an_error_is_made_anew(
    server: NatsServer, bus: NatsBus
) -> None:
    await bus.serve(Echo, echo)
    heard: list[int] = []
    subscription = await bus.subscribe(Note, lambda note: heard.append(note.number))
    async with bus.watch_presence() as entries:
        client = bus._wire.client  # type: ignore[attr-defined]  # the bus itself sends nothing that a broker refuses
        client._transport.write(b"NONSENSE\r\n")
        await until(lambda: client.is_closed)
        late = await bus.subscribe(Note, lambda note: heard.append(-note.number))  # between two connections
        assert await persist(lambda: ask(bus)) == Echoed("hello")
        await bus.put_presence("anna", b"1")
        await told_until(entries, PresenceEntry("anna", b"1"))
    await bus.publish(Note(number=1))
    await until(lambda: sorted(heard) == [-1, 1])
    await subscription.close()
    await late.close()
    assert bus.counts.num_reconnects_total == 1


async def test_presence_is_a_key_value_bucket_for_other_clients(server: NatsServer, bus: NatsBus) -> None:
    await bus.put_presence("anna", b"1")
    client = await nats.connect(server.url)
    bucket = await client.jetstream().key_value(PRESENCE_BUCKET)
    assert (await bucket.get("anna")).value == b"1"
    async with bus.watch_presence() as entries:
        await bucket.put("bert", b"2")
        await told_until(entries, PresenceEntry("bert", b"2"))
        await bucket.delete("bert")
        await told_until(entries, PresenceEntry("bert", None))
    await client.close()


async def test_a_bucket_that_somebody_removed_is_made_again(server: NatsServer, bus: NatsBus) -> None:
    client = await nats.connect(server.url)
    async with bus.watch_presence() as entries:
        await bus.put_presence("anna", b"1")
        await client.jetstream().delete_stream(f"KV_{PRESENCE_BUCKET}")
        await persist(lambda: bus.put_presence("anna", b"2"))
        await told_until(entries, PresenceEntry("anna", b"2"))
    assert await presences(bus, 1) == {"anna": b"2"}
    await client.close()


async def test_a_bucket_of_other_settings_is_adapted(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().create_key_value(
        bucket=PRESENCE_BUCKET, ttl=60.0, storage=nats.js.api.StorageType.MEMORY
    )
    bus = await NatsBus.connect(server.url, presence_ttl_seconds=TTL_SECONDS)
    await bus.put_presence("anna", b"1")
    status = await (await client.jetstream().key_value(PRESENCE_BUCKET)).status()
    assert status.ttl == TTL_SECONDS
    await bus.close()
    await client.close()


async def test_a_broker_without_jetstream_refuses_presence_and_serves_the_rest(server: NatsServer) -> None:
    await server.stop()
    process = await asyncio.create_subprocess_exec(
        str(find_nats_server()), "-a", "127.0.0.1", "-p", str(server.port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        bus = await persist(lambda: NatsBus.connect(server.url))
        await bus.serve(Echo, echo)
        with pytest.raises(PresenceUnavailable, match="JetStream is off"):
            await soon(bus.put_presence("anna", b"1"), AT_ONCE_SECONDS)
        async with bus.watch_presence():
            assert await ask(bus) == Echoed("hello")
        await bus.close()
    finally:
        process.terminate()
        await process.wait()


async def test_a_stranger_s_nonsense_is_answered_with_an_error(server: NatsServer, bus: NatsBus) -> None:
    await bus.serve(Echo, echo)
    client = await nats.connect(server.url)
    answer = await client.request("test.echo", b"\xc1 nonsense", timeout=AT_ONCE_SECONDS)
    assert answer.headers == {"Kvmesh-Error": "Undecodable"}
    await client.publish("test.echo", b"nobody waits for the answer")
    await client.flush()
    await until(lambda: bus.counts.num_undecodable_total == 2)
    await client.close()
    assert await ask(bus) == Echoed("hello")


async def test_requests_go_on_through_many_restarts(server: NatsServer, bus: NatsBus) -> None:
    """Each ends at once, with an answer or an error; and the last restart is as good as the first."""
    await bus.serve(Echo, echo)
    is_over = False
    num_answers = 0

    async def keep_asking() -> None:
        nonlocal num_answers
        while not is_over:
            try:
                await soon(ask(bus), 2 * AT_ONCE_SECONDS)
                num_answers += 1
            except BusError:
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(keep_asking())
        for _ in range(4):
            answered = num_answers
            await until(lambda answered=answered: num_answers > answered + 100)
            os.kill(server.pid, signal.SIGKILL)
            await server.wait_ended()
            await server.start()
        answered = num_answers
        await until(lambda: num_answers > answered + 100)
        is_over = True
    assert bus.counts.num_open_requests == 0


def test_it_all_works_on_uvloop(tmp_path: Path) -> None:
    async def live() -> None:
        server = NatsServer(tmp_path / "nats")
        await server.start()
        bus = await NatsBus.connect(server.url, presence_ttl_seconds=TTL_SECONDS)
        await bus.serve(Echo, echo)
        assert await ask(bus) == Echoed("hello")
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_ended()
        await server.start()
        await persist(lambda: bus.put_presence("anna", b"1"))
        assert await presences(bus, 1) == {"anna": b"1"}
        assert await persist(lambda: ask(bus)) == Echoed("hello")
        await bus.close()
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())
