"""Puts over one Link to a store: few frames under way at a time, and nothing read once the put has ended."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter

from libs.kv import layer_groups
from libs.kv.checksum import block_checksums, checksum_of_blocks
from libs.kv.tensors import BlockShape
from libs.transport.frames import PutLayer, PutNames, decode_header
from libs.transport.port import LinkLost
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.store_link import PUT_FRAMES_IN_FLIGHT, StoreLink
from libs.worker.stores.upload_part import UploadPart

NUM_LAYERS, NUM_BLOCKS = 10, 3
SHAPE = BlockShape(num_kv_heads=1, block_size=2, head_dim=4, dtype=torch.float32)


@pytest.fixture(autouse=True)
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_groups, "FRAME_BYTES", 1)


class HeldLink:
    """A Link whose sends end when the test says so."""

    peer, is_open = "store", True

    def __init__(self) -> None:
        self.under_way: list[tuple[Any, NDArray[np.uint8], asyncio.Future[None]]] = []
        self.headers: list[Any] = []
        self.came = asyncio.Event()

    async def send(self, header: bytes, body: NDArray[np.uint8], *, timeout_seconds: float) -> None:
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one = decode_header(header), body, taken
        self.under_way.append(one)
        self.headers.append(one[0])
        self.came.set()
        try:
            await taken
        finally:
            self.under_way.remove(one)

    async def until(self, num_under_way: int) -> None:
        async with asyncio.timeout(5):
            while len(self.under_way) < num_under_way:
                self.came.clear()
                await self.came.wait()


def layer(number: int) -> torch.Tensor:
    return torch.full((1, NUM_BLOCKS, SHAPE.num_bytes // 4), float(number))


def begin(link: HeldLink, taken: list[int]) -> "asyncio.Task[None]":
    def take_layers(layers: range) -> torch.Tensor:
        taken.append(layers.start)
        return layer(layers.start)

    metrics = StoreMetrics(
        CollectorRegistry(), Counter("bytes", "B.", ["direction"], registry=CollectorRegistry())
    )
    store_link = StoreLink(link, SHAPE, NUM_LAYERS, metrics, send_timeout_seconds=1.0)  # type: ignore[arg-type]  # all that is used
    part = UploadPart(names=[bytes([n]) * 16 for n in range(NUM_BLOCKS)], parent=b"", take_layers=take_layers)
    return asyncio.create_task(store_link.put(part))


async def test_names_go_first_and_then_a_few_layers_are_under_way_at_a_time() -> None:
    link, taken = HeldLink(), list[int]()
    putting = begin(link, taken)
    await link.until(1)
    assert isinstance(link.under_way[0][0], PutNames)
    assert taken == []
    link.under_way[0][2].set_result(None)
    for number in range(NUM_LAYERS):
        await link.until(min(PUT_FRAMES_IN_FLIGHT, NUM_LAYERS - number))
        assert len(taken) == min(number + PUT_FRAMES_IN_FLIGHT, NUM_LAYERS)
        header, body, is_taken = link.under_way[0]
        assert isinstance(header, PutLayer)
        assert (header.layer, header.checksum) == (
            number,
            checksum_of_blocks(block_checksums(body, NUM_BLOCKS)),
        )
        assert body.view(np.float32).tolist() == layer(number).flatten().tolist()
        is_taken.set_result(None)
        await asyncio.sleep(0)
    await putting
    assert taken == list(range(NUM_LAYERS))


async def test_a_lost_link_ends_the_put_when_no_frame_is_read_any_more() -> None:
    link, taken = HeldLink(), list[int]()
    putting = begin(link, taken)
    await link.until(1)
    link.under_way[0][2].set_result(None)
    await link.until(PUT_FRAMES_IN_FLIGHT)
    first, *others = list(link.under_way)
    first[2].set_exception(LinkLost("cut"))
    await asyncio.sleep(0)
    assert not putting.done()
    for _, _, is_taken in others:
        is_taken.set_exception(LinkLost("cut"))
    with pytest.raises(LinkLost):
        await putting
    assert link.under_way == []
    assert len(taken) == PUT_FRAMES_IN_FLIGHT


async def test_a_put_that_is_cancelled_ends_its_sends_first() -> None:
    link, taken = HeldLink(), list[int]()
    putting = begin(link, taken)
    await link.until(1)
    link.under_way[0][2].set_result(None)
    await link.until(PUT_FRAMES_IN_FLIGHT)
    putting.cancel()
    await asyncio.wait([putting])
    assert putting.cancelled()
    assert link.under_way == []
