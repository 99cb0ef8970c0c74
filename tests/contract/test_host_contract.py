"""What every Host does for a home's engine, in memory and over Links."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
from hosting_scene import MODELS, NUM_BLOCKS, Home, HostScene
from memory_host import synchronous_host
from memory_transport import MemoryNetwork, any_transport

from libs.engine.hosting.calls import (
    ANSWERED,
    Attend,
    BeginStep,
    HostedCall,
    MoveBlocks,
    ReadBlocks,
    RunLayers,
    Settle,
    WriteBlocks,
)
from libs.engine.hosting.port import Answer, Host, HostLost
from libs.engine.thread_loop import ThreadLoop
from libs.model.layer import Layer
from libs.placement.module import Module, heads_of, whole_layers
from libs.placement.placement import HostedModuleStatus
from libs.transport.choose import TransportKind
from libs.transport.port import Transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.host.server import OwnerLink
from libs.worker.migration.host.weights import form_of
from libs.worker.migration.owner.remote_host import RemoteHost

SECONDS = 10.0
GUEST = "home"
MODEL = MODELS["gqa"]
TABLES = [[3, 1, 5], [7, 2, 9], [11, 20, 23]]


class HereAndNow:
    """Hosting by an engine that does each call at once."""

    def __init__(self, scene: HostScene) -> None:
        self.scene = scene

    async def open(
        self,
        guest: str,
        move_id: str,
        module: Module,
        *,
        num_blocks_wanted: int,
        num_blocks_least: int,
        layers: MutableMapping[int, Layer] | None,
        weight_bytes: int = 0,
    ) -> int:
        return self.scene.modules.open(
            guest,
            move_id,
            module,
            num_blocks_wanted=num_blocks_wanted,
            num_blocks_least=num_blocks_least,
            layers=layers,
            weight_bytes=weight_bytes,
        )

    def call(self, guest: str, call: HostedCall, answer: Answer) -> None:
        self.scene.modules.put(guest, call, answer)
        self.scene.modules.run_all()

    async def close(self, guest: str, move_id: str) -> None:
        self.scene.modules.close(guest, move_id)

    async def close_owner(self, guest: str) -> None:
        self.scene.modules.close_owner(guest)

    def hosted(self) -> tuple[HostedModuleStatus, ...]:
        return self.scene.modules.hosted()


class Stage:
    """One Host, and what is behind it."""

    def __init__(self, there: HostScene) -> None:
        self.there = there
        self.host: Host
        self.woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self.woken.set)

    def open(self, module: Module) -> None:
        self.there.modules.open(GUEST, "m", module, num_blocks_wanted=NUM_BLOCKS, num_blocks_least=NUM_BLOCKS)

    async def result(self, answer: Answer) -> torch.Tensor:
        async with asyncio.timeout(SECONDS):
            while not answer.is_done:
                self.woken.clear()
                if not answer.is_done:
                    await self.woken.wait()
        return answer.result()

    async def ask(self, call: HostedCall) -> torch.Tensor:
        return await self.result(self.host.call(call))


class TurnedByThreads:
    """An own thread for each of some loops."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._threads: list[tuple[ThreadLoop, threading.Thread]] = []

    def loop(self) -> ThreadLoop:
        turned = ThreadLoop()
        thread = threading.Thread(target=self._turn, args=(turned,))
        self._threads.append((turned, thread))
        thread.start()
        return turned

    def _turn(self, turned: ThreadLoop) -> None:
        while not self._ending.is_set():
            turned.sleep(None)
        turned.close()

    async def end(self) -> None:
        self._ending.set()
        for turned, thread in self._threads:
            turned.wake()
            await asyncio.to_thread(thread.join)


def call_links(
    loop: ThreadLoop | None, open_transport: Callable[[], Transport], wake: Callable[[], None]
) -> CallLinks:
    return CallLinks(
        loop,
        open_transport,
        wake=wake,
        timeout_seconds=SECONDS,
        on_call_done=lambda seconds: None,
        on_hosted_call_done=lambda seconds: None,
    )


@asynccontextmanager
async def over_links(
    kind: TransportKind, stage: Stage, threads: TurnedByThreads | None
) -> AsyncIterator[RemoteHost]:
    network, hosting = MemoryNetwork(), HereAndNow(stage.there)

    def transport(incarnation: str) -> Transport:
        return any_transport(kind, incarnation, b"secret", network=network)

    near, far = transport(GUEST), transport("the-host")
    if threads is not None:
        near_calls, far_calls = (
            call_links(threads.loop(), partial(transport, name), stage.wake) for name in (GUEST, "the-host")
        )
    else:
        near_calls, far_calls = (call_links(None, lambda at=at: at, stage.wake) for at in (near, far))
    await far_calls.listen("127.0.0.1")
    serving = [asyncio.ensure_future(far_calls.accept(hosting))]
    calls = await near_calls.connect("the-host", far_calls.address, lambda calls, why: None)
    listener = await far.listen("127.0.0.1")
    link = await near.connect(listener.address, timeout_seconds=SECONDS)
    guest = OwnerLink(
        await listener.accept(),
        hosting,
        form_of(MODEL),
        fingerprint="same",
        lease_seconds=SECONDS,
        send_timeout_seconds=SECONDS,
        on_change=lambda: None,
        is_leaving=lambda: False,
    )
    host = RemoteHost(
        link,
        calls,
        fingerprint="same",
        on_leaving=lambda: None,
        timeout_seconds=SECONDS,
        ping_seconds=0.5,
    )
    serving += [asyncio.ensure_future(guest.serve()), asyncio.ensure_future(host.serve())]
    yield host
    serving[0].cancel()
    await near_calls.close()
    await far_calls.close()
    await near.close()
    await far.close()
    await asyncio.wait(serving, timeout=SECONDS)
    assert all(one.done() for one in serving)
    assert not stage.there.modules.hosted()


@pytest.fixture(params=["in-memory", "memory", "shm", "ucx", "shm, own threads", "ucx, own threads"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    stage = Stage(HostScene(MODEL))
    async with AsyncExitStack() as stack:
        if request.param == "in-memory":
            stage.host = synchronous_host("the-host", GUEST, stage.there.modules)
        else:
            name, _, on_threads = request.param.partition(", ")
            threads = TurnedByThreads() if on_threads else None
            if threads is not None:
                stack.push_async_callback(threads.end)
            links = over_links(cast("TransportKind", name), stage, threads)
            stage.host = await stack.enter_async_context(links)
        yield stage


def test_calls_without_an_answer_are_done_when_they_return(stage: Stage) -> None:
    stage.open(whole_layers(1, 3))
    answer = stage.host.call(MoveBlocks(np.empty((2, 0), dtype=np.int64)))
    assert answer.is_done
    assert not answer.result().numel()


async def test_a_host_is_named_by_its_incarnation(stage: Stage) -> None:
    assert stage.host.worker == "the-host"


async def test_layers_run_there_as_they_would_here(stage: Stage) -> None:
    stage.open(whole_layers(1, 3))
    home = Home(MODEL, TABLES)
    for num_new in ([5, 0, 17], [3, 9, 1], [1, 1, 1], [1, 0, 1]):
        stage.host.call(home.step(num_new))
        assert torch.equal(await stage.ask(RunLayers("m", home.hidden[1])), home.hidden[3])


async def test_only_the_wanted_rows_of_the_last_layer_come_back(stage: Stage) -> None:
    stage.open(whole_layers(2, 4))
    home = Home(MODEL, TABLES)
    begun = home.step([4, 9, 2])
    for rows in ([3, 14], []):
        fields = {name: getattr(begun, name) for name in BeginStep.__struct_fields__}
        stage.host.call(BeginStep(**{**fields, "last_tokens": np.array(rows, dtype=np.int64)}))
        came = await stage.ask(RunLayers("m", home.hidden[2]))
        assert came.shape == (len(rows), MODEL.config.hidden_size)
        torch.testing.assert_close(came, home.hidden[4][rows])


async def test_heads_attend_there_as_they_would_here(stage: Stage) -> None:
    stage.open(heads_of(0, 4, (1,)))
    home = Home(MODEL, TABLES)
    for num_new in ([5, 0, 17], [3, 9, 1], [1, 1, 1]):
        stage.host.call(home.step(num_new))
        asked: list[tuple[Answer, torch.Tensor]] = []
        for layer, (q, k, v) in enumerate(home.qkv):  # more than one is under way at once
            own = slice(2, 4)
            call = Attend("m", layer, q[:, own].contiguous(), k[:, 1:2].contiguous(), v[:, 1:2].contiguous())
            asked.append((stage.host.call(call), home.attended[layer][:, own]))
        for answer, expected in asked:
            torch.testing.assert_close(await stage.result(answer), expected)


async def test_blocks_are_read_as_they_were_written_and_follow_their_ids(stage: Stage) -> None:
    stage.open(heads_of(1, 3, (0, 2)))
    blocks = np.array([4, 9, 0], dtype=np.int64)
    kv = torch.randn(3, 4, 2, 8, 16)
    stage.host.call(WriteBlocks("m", None, blocks, kv))
    assert torch.equal(await stage.ask(ReadBlocks("m", None, blocks)), kv)
    assert torch.equal(await stage.ask(ReadBlocks("m", 2, blocks)), kv[:, 2:])
    stage.host.call(MoveBlocks(np.array([[9], [17]])))
    stage.host.call(WriteBlocks("m", 1, blocks[:1], changed := torch.randn(1, 2, 2, 8, 16)))
    moved = await stage.ask(ReadBlocks("m", None, np.array([17, 4], dtype=np.int64)))
    assert torch.equal(moved[0], kv[1])
    assert torch.equal(moved[1], torch.cat([changed[0], kv[0, 2:]]))


async def test_a_piece_larger_than_a_frame_arrives_whole(stage: Stage) -> None:
    stage.open(whole_layers(1, 3))
    blocks = np.arange(NUM_BLOCKS, dtype=np.int64)
    kv = torch.randn(NUM_BLOCKS, 6, 2, 8, 16)
    assert kv.nbytes > 100_000
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("libs.worker.migration.framing.PIECE_BYTES", 4096)
        stage.host.call(WriteBlocks("m", None, blocks, kv))
        assert torch.equal(await stage.ask(ReadBlocks("m", None, blocks)), kv)


async def test_settle_is_answered_by_an_empty_tensor(stage: Stage) -> None:
    stage.open(whole_layers(1, 3))
    assert not (await stage.ask(Settle())).numel()


async def test_what_a_call_without_an_answer_breaks_is_told_by_the_next_answer(stage: Stage) -> None:
    stage.open(whole_layers(1, 3))
    stage.host.call(WriteBlocks("other", None, np.zeros(1, dtype=np.int64), torch.zeros(1, 6, 2, 8, 16)))
    for _ in range(2):
        with pytest.raises(HostLost, match="other"):
            await stage.ask(Settle())


async def test_calls_to_a_host_that_dropped_this_home_fail(stage: Stage) -> None:
    stage.open(whole_layers(1, 3))
    await stage.ask(Settle())
    stage.there.modules.close_owner(GUEST)
    with pytest.raises(HostLost):
        await stage.ask(Settle())


async def test_every_answered_call_has_a_test_here() -> None:
    assert {one.__name__ for one in ANSWERED} - {"AttendLent"} == {
        "RunLayers",
        "Attend",
        "ReadBlocks",
        "Settle",
    }


# Over Links only.


@pytest.fixture(params=["memory", "ucx"])
async def linked(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Stage, RemoteHost]]:
    stage = Stage(HostScene(MODEL))
    async with over_links(cast("TransportKind", request.param), stage, None) as host:
        stage.host = host
        yield stage, host


async def test_a_lost_link_fails_all_answers_also_the_next_ones(linked: tuple[Stage, RemoteHost]) -> None:
    stage, host = linked
    stage.open(whole_layers(1, 3))
    stage.there.modules.run_all = lambda: None  # a host that is stuck
    answers = [host.call(Settle()) for _ in range(3)]
    await host.close()
    for answer in [*answers, host.call(Settle()), host.call(MoveBlocks(np.empty((2, 0), dtype=np.int64)))]:
        with pytest.raises(HostLost):
            await stage.result(answer)
    with pytest.raises(HostLost):
        await host.close_module("m")
