"""The second process of the bench, and the plain socket that Links are held against.
`python -m tests.bench.link_peer KIND` prints its address and serves until it is killed."""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import cast

from libs.transport.choose import TransportKind, make_transport
from libs.transport.port import LinkLost

MIB = 1 << 20
BODY_MIB = (1, 16, 64)
BYTES_PER_SIZE = 1 << 30
NUM_ROUND_TRIPS = 3000
NUM_WARM_UPS = 200
ROUND_TRIP_BYTES = 64
DEADLINE_SECONDS = 30.0
SECRET = b"a secret of the bench"
ECHO, SINK, TELL = b"echo", b"sink", b"tell"

RoundTrips = Callable[[Callable[[], Awaitable[None]]], Awaitable[dict[str, float]]]


def num_bodies(mib: int) -> int:
    """How many bodies of this size are sent."""
    return max(BYTES_PER_SIZE // (mib * MIB), 8)


async def serve_link(kind: TransportKind) -> None:
    """Do as the headers say: echo, sink, or tell when all before was taken."""
    transport = make_transport(kind, "bench-peer", SECRET)
    listener = await transport.listen("127.0.0.1")
    print(listener.address, flush=True)
    link = await listener.accept()
    try:
        while True:
            frame = await link.receive()
            if frame.header != SINK:
                await link.send(frame.header, frame.body, timeout_seconds=DEADLINE_SECONDS)
            frame.release()
    except LinkLost:
        await transport.close()


async def serve_socket() -> None:
    """The same over a plain socket: echo small messages, then take each size and answer once."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        print(server.getsockname()[1], flush=True)
        connection, _ = await loop.sock_accept(server)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        message = bytearray(ROUND_TRIP_BYTES)
        for _ in range(NUM_WARM_UPS + NUM_ROUND_TRIPS):
            await receive_exactly(connection, memoryview(message))
            await loop.sock_sendall(connection, message)
        for mib in BODY_MIB:
            body = memoryview(bytearray(mib * MIB))
            for _ in range(num_bodies(mib)):
                await receive_exactly(connection, body)
            await loop.sock_sendall(connection, message)


async def measure_socket(address: str, round_trips: RoundTrips) -> dict[str, float]:
    """The client of `serve_socket`."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, ("127.0.0.1", int(address)))
        message = bytearray(ROUND_TRIP_BYTES)

        async def round_trip() -> None:
            await loop.sock_sendall(connection, message)
            await receive_exactly(connection, memoryview(message))

        figures = await round_trips(round_trip)
        for mib in BODY_MIB:
            body = bytearray(mib * MIB)
            begun = loop.time()
            for _ in range(num_bodies(mib)):
                await loop.sock_sendall(connection, body)
            await receive_exactly(connection, memoryview(message))
            figures[f"{mib} MiB, GB/s"] = num_bodies(mib) * len(body) / (loop.time() - begun) / 1e9
        return figures


async def receive_exactly(connection: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises ConnectionResetError when the other process goes."""
    loop = asyncio.get_running_loop()
    while into:
        num_bytes = await loop.sock_recv_into(connection, into)
        if not num_bytes:
            raise ConnectionResetError("the other process of the bench hung up")
        into = into[num_bytes:]


if __name__ == "__main__":
    if sys.argv[1] == "socket":
        asyncio.run(serve_socket())
    else:
        asyncio.run(serve_link(cast("TransportKind", sys.argv[1])))
