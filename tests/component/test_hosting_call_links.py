"""Links of calls at the engines that they lead to: what overtakes what, what a busy or dead engine means."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from call_links_scene import SECONDS, call_links
from engine_harness import Listener
from hosting_scene import MODELS, Home

from libs.engine.engine import Engine, EngineSettings
from libs.engine.hosting.calls import RunLayers, Settle, WriteBlocks
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.thread_loop import ThreadLoop
from libs.model.model import Model
from libs.placement.module import heads_of, whole_layers
from libs.transport.choose import make_transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.host.server import OwnerLink
from libs.worker.migration.host.weights import form_of
from libs.worker.migration.owner.remote_host import RemoteHost
from libs.worker.migration.threads import LoopEnded, run_on_loop

MODEL = MODELS["gqa"]
SLOW_LAYER_SECONDS = 0.1


@dataclass
class Scene:
    """An engine that hosts, and a home that calls it from the test's loop."""

    engine: Engine
    calls: CallLinks
    home: CallLinks
    link: RemoteHost


@asynccontextmanager
async def hosting(listener: Listener | None = None) -> AsyncGenerator[Scene]:
    sizes = EngineSettings(max_model_len=128, num_blocks=200, block_size=8, max_num_batched_tokens=64)
    engine = Engine(MODEL, sizes, home="host")
    await engine.start(listener or Listener())
    near, far = (make_transport("ucx", name, b"secret") for name in ("home", "host"))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        calls = await stack.enter_async_context(call_links("ucx", "host", engine))
        home = await stack.enter_async_context(call_links("ucx", "home"))
        stack.push_async_callback(near.close)
        stack.push_async_callback(far.close)
        listening = await far.listen("127.0.0.1")
        link = RemoteHost(
            await near.connect(listening.address, timeout_seconds=SECONDS),
            await home.connect("host", calls.address, lambda calls, why: None),
            fingerprint="same",
            on_leaving=lambda: None,
            timeout_seconds=SECONDS,
            ping_seconds=1.0,
        )
        guest = OwnerLink(
            await listening.accept(),
            engine.hosting,
            form_of(MODEL),
            fingerprint="same",
            lease_seconds=SECONDS,
            send_timeout_seconds=SECONDS,
            on_change=lambda: None,
            is_leaving=lambda: False,
        )
        serving = [asyncio.ensure_future(guest.serve()), asyncio.ensure_future(link.serve())]
        yield Scene(engine, calls, home, link)
        await link.close()
        await asyncio.wait(serving)


async def open_heads(link: RemoteHost, move_id: str, head: int) -> None:
    await link.open(
        move_id, heads_of(0, 4, (head,)), num_blocks_wanted=4, num_blocks_least=1, has_weights=False
    )


async def test_what_is_written_to_a_module_that_closes_harms_no_other() -> None:
    async with hosting() as scene:
        await open_heads(scene.link, "stays", 0)
        for number in range(5):
            await open_heads(scene.link, f"goes{number}", 1)
            for _ in range(100):
                kv = torch.zeros(1, 4, 2, 8, 16)
                scene.link.call(WriteBlocks(f"goes{number}", None, np.zeros(1, dtype=np.int64), kv))
            await scene.link.close_module(f"goes{number}")
            await scene.link.settle()


@pytest.fixture
def slow_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Model.mlp

    def slow(self: Model, *args: object) -> torch.Tensor:
        time.sleep(SLOW_LAYER_SECONDS)
        return fast(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "mlp", slow)


async def test_guests_with_work_without_end_keep_no_other_from_coming_in(slow_layers: None) -> None:
    async with hosting() as scene:
        layers = whole_layers(1, 4)
        await scene.link.open("busy", layers, num_blocks_wanted=24, num_blocks_least=1, has_weights=False)
        home, woken = Home(MODEL, [[3, 1, 5], [7, 2, 9], [11, 20, 23]]), asyncio.Event()
        scene.engine.hosting.call("home", home.step([5, 0, 17]), Answer(lambda: None))
        loop = asyncio.get_running_loop()
        last = Answer(lambda: loop.call_soon_threadsafe(woken.set))
        for answer in (*(Answer(lambda: None) for _ in range(20)), last):
            scene.engine.hosting.call("home", RunLayers("busy", home.hidden[1]), answer)
        async with call_links("ucx", "other") as other:
            calls = await other.connect("host", scene.calls.address, lambda calls, why: None)
            with pytest.raises(HostLost, match="no module of this owner"):
                await calls.settle()
            assert not last.is_done
        await woken.wait()


async def test_an_engine_that_ends_cuts_its_links() -> None:
    lost: list[str] = []
    async with hosting() as scene, call_links("ucx", "other") as other:
        calls = await other.connect("host", scene.calls.address, lambda calls, why: lost.append(why))
        await scene.engine.close()
        async with asyncio.timeout(SECONDS):
            while not lost:  # noqa: ASYNC110 - told by no event
                await asyncio.sleep(0.01)
        with pytest.raises(HostLost):
            calls.call(Settle()).result()
        assert scene.calls.num_open_links() == 0
        with pytest.raises(HostLost):
            await scene.calls.connect("home", "ucx://127.0.0.1:1", lambda calls, why: None)


async def test_what_is_handed_to_a_loop_that_ends_is_told_so() -> None:
    turned = ThreadLoop()
    handed = asyncio.ensure_future(run_on_loop(turned.loop, asyncio.sleep(SECONDS)))
    await asyncio.sleep(0)
    await asyncio.to_thread(turned.close)
    with pytest.raises(LoopEnded):
        await handed
    with pytest.raises(LoopEnded):
        await run_on_loop(turned.loop, asyncio.sleep(SECONDS))


async def test_what_runs_on_a_loop_that_ends_is_told_so() -> None:
    turned = ThreadLoop()
    handed = asyncio.ensure_future(run_on_loop(turned.loop, asyncio.sleep(SECONDS)))
    await asyncio.sleep(0)
    await asyncio.to_thread(turned.turn)
    await asyncio.to_thread(turned.close)
    with pytest.raises(LoopEnded):
        await handed
