"""Fixtures of the contract tests."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from bus_scene import AT_ONCE_SECONDS, MemoryScene, NatsScene, Scene
from link_pair import Pair, linked_pair

if TYPE_CHECKING:
    from libs.transport.choose import TransportKind


@pytest.fixture(autouse=True)
def kernels_share_their_work(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels run with two threads at least, also where tests run beside each other with one each: what only
    goes wrong between threads has to show here."""
    before = torch.get_num_threads()
    if "test_kernels" in request.node.nodeid:
        torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["memory", "nats"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    before = asyncio.all_tasks()
    scene: Scene = MemoryScene() if request.param == "memory" else NatsScene(tmp_path / "nats")
    yield scene
    await scene.close()
    if left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        _, running = await asyncio.wait(left, timeout=AT_ONCE_SECONDS)  # what was cancelled ends by itself
        assert not running


@pytest.fixture(params=["memory", "shm", "ucx", "auto"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with linked_pair(cast("TransportKind", request.param)) as pair:
        yield pair
