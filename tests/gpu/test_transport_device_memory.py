"""Bodies in CUDA memory: sent from where they lie, and received into where they shall lie."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from libs.transport.credits import LinkLimits
from libs.transport.handshake import Identity
from libs.transport.memory import Memory, as_memory, copy_to_host
from libs.transport.pool import allocate_host
from libs.transport.port import Link
from libs.transport.ucx.transport import UcxTransport

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SECONDS = 20.0
IDLE_POOL_BYTES = 256 << 20


def allocate_device(num_bytes: int) -> Memory:
    return as_memory(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))


async def joined(allocate: Callable[[int], Memory]) -> AsyncIterator[tuple[Link, Link]]:
    transports = [
        UcxTransport(
            Identity(kind="ucx", incarnation=name, secret=b"secret", limits=LinkLimits()),
            IDLE_POOL_BYTES,
            allocate,
        )
        for name in ("near", "far")
    ]
    listener = await transports[1].listen("127.0.0.1")
    near = await transports[0].connect(listener.address, timeout_seconds=SECONDS)
    yield near, await listener.accept()
    for transport in transports:
        await transport.close()


@pytest.mark.parametrize("num_bytes", [1000, 100_000, 32 << 20])
@pytest.mark.parametrize("allocate", [allocate_host, allocate_device])
async def test_a_cuda_tensor_arrives_as_it_was_sent(
    num_bytes: int, allocate: Callable[[int], Memory]
) -> None:
    tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    async for near, far in joined(allocate):
        sending = asyncio.ensure_future(near.send(b"kv", as_memory(tensor), timeout_seconds=SECONDS))
        frame = await far.receive(timeout_seconds=SECONDS)
        received = allocate_host(num_bytes)
        memory = frame.memory  # type: ignore[attr-defined]  # of link.Frame
        if memory.is_device:
            begin = memory.address - memory.owner.data_ptr()
            assert torch.equal(memory.owner[begin : begin + num_bytes], tensor)
        else:
            copy_to_host(memory, received.owner[:num_bytes])  # type: ignore[index]
            assert received.owner[:num_bytes].tobytes() == tensor.cpu().numpy().tobytes()  # type: ignore[index]
        frame.release()
        await sending
