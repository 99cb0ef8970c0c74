"""Fixtures of the component tests."""

from collections.abc import AsyncGenerator

import pytest
from gateway_coordinator import Coordinator
from gateway_mesh import Mesh, running_gateway
from gateway_moves import ADMIN_KEY

from libs.bus.memory_broker import MemoryBroker
from libs.bus.memory_bus import MemoryBus


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
