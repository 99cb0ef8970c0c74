"""Fixtures of the contract tests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bus_scene import AT_ONCE_SECONDS, MemoryScene, NatsScene, Scene


@pytest.fixture(params=["memory", "nats"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    before = asyncio.all_tasks()
    scene: Scene = MemoryScene() if request.param == "memory" else NatsScene(tmp_path / "nats")
    yield scene
    await scene.close()
    if left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        _, running = await asyncio.wait(left, timeout=AT_ONCE_SECONDS)  # what was cancelled ends by itself
        assert not running
