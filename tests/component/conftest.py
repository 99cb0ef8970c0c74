"""Fixtures of the component tests."""

from collections.abc import AsyncGenerator

import pytest
from gateway_coordinator import Coordinator, Owners
from gateway_mesh import Mesh, running_gateway
from gateway_moves import ADMIN_KEY
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.kv import layer_groups


@pytest.fixture
async def mesh(request: pytest.FixtureRequest) -> AsyncGenerator[Mesh]:
    """A gateway that takes orders to move modules; a test may give it settings by a parameter."""
    broker = MemoryBroker()
    settings = {"admin_key": ADMIN_KEY, **getattr(request, "param", {})}
    async with running_gateway(MemoryBus(broker), MemoryBus(broker), **settings) as mesh:
        yield mesh


@pytest.fixture
async def coordinator(mesh: Mesh) -> Coordinator:
    """One that leads there."""
    coordinator = Coordinator(mesh.bus)
    await coordinator.open()
    return coordinator


@pytest.fixture
async def owners(mesh: Mesh) -> Owners:
    """The workers there, which take orders to move modules."""
    owners = Owners(mesh.bus)
    await owners.open()
    return owners


@pytest.fixture
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV goes over Links a layer at a time; those of the tiny model would all share a frame."""
    monkeypatch.setattr(layer_groups, "FRAME_BYTES", 1)
