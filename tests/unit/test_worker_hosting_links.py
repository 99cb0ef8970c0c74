"""Both ends of the Link between a home and a host: refusals, garbage, bounds and leases."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from kept_hosting import Kept
from workers_reference import CONFIG

from libs.engine.errors import MoveRefused, NoRoom
from libs.engine.hosting.calls import HostedCall, RunLayers, Settle, WriteBlocks
from libs.engine.hosting.port import Answer, HostLost
from libs.model.layer import layer_bytes
from libs.model.layer_weights import layer_tensors
from libs.model.random_model import random_model
from libs.placement.module import whole_layers
from libs.transport.choose import make_transport
from libs.transport.memory_transport import MemoryNetwork
from libs.transport.port import Link, Transport
from libs.worker.hosting import host_calls
from libs.worker.hosting.call_links import CallLinks
from libs.worker.hosting.frames import encode
from libs.worker.hosting.host_calls import HostCalls
from libs.worker.hosting.host_link import HostLink
from libs.worker.hosting.incoming_weights import form_of
from libs.worker.hosting.messages import Call, Leaving, Opened, Ping, Result, SettleCall, WeightPiece
from libs.worker.hosting.server import HostingServer

SECONDS = 5.0


class Scene:
    """One host that serves, and any number of homes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = random_model(CONFIG, seed=7, dtype=dtype)
        self.network, self.hosting = MemoryNetwork(), Kept()
        self.far = make_transport("memory", "host", b"secret", network=self.network)
        self.tasks: list[asyncio.Task[object]] = []
        self.left: list[str] = []
        self.call_links_made: list[CallLinks] = []
        self.lost: list[str] = []
        """Why Links for calls were."""
        self.lease_seconds = SECONDS

    async def open(self) -> None:
        self.server = HostingServer(
            await self.far.listen("here"),
            self.hosting,
            form_of(self.model),
            self.spawn,
            lambda: None,
            fingerprint="same",
            lease_seconds=self.lease_seconds,
            send_timeout_seconds=SECONDS,
        )
        self.spawn("guests", self.server.run())
        self.calls = self.call_links(self.far)
        await self.calls.listen("there")
        self.spawn("calls", self.calls.accept(self.hosting))

    def call_links(self, transport: Transport, timeout_seconds: float = SECONDS) -> CallLinks:
        links = CallLinks(
            None,
            lambda: transport,
            wake=lambda: None,
            timeout_seconds=timeout_seconds,
            on_call_done=lambda seconds: None,
            on_hosted_call_done=lambda seconds: None,
        )
        self.call_links_made.append(links)
        return links

    def spawn(self, name: str, work: Awaitable[None]) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]  # always coroutines
        self.tasks.append(task)
        return task

    def near(self, home: str) -> Transport:
        return make_transport("memory", home, b"secret", network=self.network)

    async def connect(self, home: str = "home") -> Link:
        return await self.near(home).connect(self.server.address, timeout_seconds=SECONDS)

    async def home(self, name: str = "home", *, timeout_seconds: float = SECONDS, **facts: str) -> HostLink:
        links = self.call_links(self.near(name), timeout_seconds)
        host = HostLink(
            await self.connect(name),
            await links.connect("host", self.calls.address, lambda calls, why: self.lost.append(why)),
            fingerprint=facts.get("fingerprint", "same"),
            on_leaving=lambda: self.left.append(name),
            timeout_seconds=timeout_seconds,
            ping_seconds=0.02,
        )
        self.spawn("host", host.serve())
        return host

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():  # noqa: ASYNC110 - a Link's two ends have no common event
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for links in self.call_links_made:
            await links.close()
        await self.far.close()


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncGenerator[Scene]:
    scene = Scene(getattr(request, "param", torch.float32))
    await scene.open()
    yield scene
    await scene.close()


async def open_one(host: HostLink, move_id: str = "m", has_weights: bool = False) -> int:
    return await host.open(
        move_id,
        whole_layers(0, 2),
        num_blocks_wanted=9,
        num_blocks_least=3,
        has_weights=has_weights,
    )


def whole(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Each in one piece."""
    return ((name, 0, tensor.reshape(-1).view(torch.uint8)) for name, tensor in tensors)


async def test_a_module_is_opened_and_closed(scene: Scene) -> None:
    host = await scene.home()
    assert await open_one(host) == 9
    assert scene.hosting.modules == {("home", "m"): None}
    await host.close_module("m")
    await host.close_module("m")
    assert not scene.hosting.modules


@pytest.mark.parametrize("refusal", [NoRoom("full"), MoveRefused("never")])
async def test_a_refusal_is_the_same_error_at_home(scene: Scene, refusal: Exception) -> None:
    scene.hosting.refusal = refusal
    host = await scene.home()
    with pytest.raises(type(refusal), match=str(refusal)):
        await open_one(host)
    scene.hosting.refusal = None
    assert await open_one(host) == 9


async def test_a_long_refusal_still_fits_into_a_header(scene: Scene) -> None:
    scene.hosting.refusal = NoRoom("x" * 100_000)
    with pytest.raises(NoRoom):
        await open_one(await scene.home())


async def test_another_model_is_refused(scene: Scene) -> None:
    with pytest.raises(MoveRefused, match="model"):
        await open_one(await scene.home(fingerprint="other"))
    assert not scene.hosting.modules


@pytest.mark.parametrize("scene", [torch.float32, torch.bfloat16], indirect=True, ids=str)
async def test_weights_arrive_in_pieces_and_become_layers_whose_memory_was_asked_for(scene: Scene) -> None:
    host, layers = await scene.home(), (0, 1)
    await open_one(host, has_weights=True)
    for layer in layers:
        for name, tensor in layer_tensors(scene.model.layer(layer)).items():
            flat = tensor.reshape(-1).view(torch.uint8)
            for first in range(0, flat.numel(), 1000):
                await host.send_weights("m", layer, name, first, flat[first : first + 1000])
    came = scene.hosting.modules["home", "m"]
    assert came is not None
    assert sorted(came) == [0, 1]
    for layer in layers:
        expected = layer_tensors(scene.model.layer(layer))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in layer_tensors(came[layer]).items())
    assert scene.hosting.num_weight_bytes == sum(map(layer_bytes, came.values()))


async def test_a_close_that_overtakes_its_open_leaves_nothing(scene: Scene) -> None:
    host = await scene.home()
    scene.hosting.may_open.clear()
    opening = asyncio.ensure_future(open_one(host))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(host.close_module("m"))
    await asyncio.sleep(0)
    scene.hosting.may_open.set()
    await asyncio.gather(opening, closing)
    assert not scene.hosting.modules


@pytest.mark.parametrize(
    "frame",
    [
        (b"nonsense", np.zeros(3, dtype=np.uint8)),
        encode(Opened(ask_id=1, num_blocks=1)),
        encode(Call(call_id=0, facts=SettleCall())),
        encode(Call(call_id=1, facts=SettleCall()), [torch.ones(1)]),
        encode(WeightPiece(ask_id=1, move_id="m", layer=0, name="qkv.weight", first_byte=0)),
    ],
)
async def test_garbage_ends_its_own_link_and_no_other(
    scene: Scene, frame: tuple[bytes, "np.ndarray[tuple[int], np.dtype[np.uint8]]"]
) -> None:
    good = await scene.home("good")
    await open_one(good)
    bad = await scene.connect("bad")
    await bad.send(*frame, timeout_seconds=SECONDS)
    await scene.until(lambda: not bad.is_open)
    await good.settle()
    assert list(scene.hosting.modules) == [("good", "m")]


@pytest.mark.parametrize(
    "frame",
    [
        (b"nonsense", np.zeros(3, dtype=np.uint8)),
        encode(Ping()),
        encode(Call(call_id=0, facts=SettleCall())),
        encode(Call(call_id=1, facts=SettleCall()), [torch.ones(1)]),
        encode(Result(call_id=1), [torch.ones(1)]),
    ],
)
async def test_garbage_among_calls_ends_their_own_link_and_no_other(
    scene: Scene, frame: tuple[bytes, "np.ndarray[tuple[int], np.dtype[np.uint8]]"]
) -> None:
    good = await scene.home("good")
    await open_one(good)
    bad = await scene.near("bad").connect(scene.calls.address, timeout_seconds=SECONDS)
    await bad.send(*frame, timeout_seconds=SECONDS)
    await scene.until(lambda: not bad.is_open)
    await good.settle()
    assert scene.hosting.modules == {("good", "m"): None}


async def test_a_second_link_for_calls_ends_the_first(scene: Scene) -> None:
    first = await scene.home()
    second = await scene.home()
    await scene.until(lambda: first.calls.lost is not None)
    await second.settle()


async def test_a_guest_whose_link_ends_has_nothing_left(scene: Scene) -> None:
    host = await scene.home()
    await open_one(host)
    await host.close()
    await scene.until(lambda: not scene.hosting.modules)


async def test_a_second_link_of_a_home_ends_the_first_and_begins_anew(scene: Scene) -> None:
    first = await scene.home()
    await open_one(first)
    second = await scene.home()
    assert await open_one(second, "n") == 9
    assert list(scene.hosting.modules) == [("home", "n")]
    assert first.calls.lost


async def test_a_silent_guest_is_dropped_when_its_lease_ends() -> None:
    scene = Scene()
    scene.lease_seconds = 0.1
    await scene.open()
    talking, silent = await scene.home("talking"), await scene.connect("silent")
    await open_one(talking)
    await silent.send(*encode(Ping()), timeout_seconds=SECONDS)
    await scene.until(lambda: not silent.is_open)
    assert list(scene.hosting.modules) == [("talking", "m")]
    await scene.close()


async def test_a_host_that_drains_asks_for_its_modules_to_leave_and_takes_no_more(scene: Scene) -> None:
    host, other = await scene.home("one"), await scene.home("two")
    await open_one(host)
    draining = asyncio.ensure_future(scene.server.drain())
    await scene.until(lambda: scene.left == ["one", "two"])
    with pytest.raises(MoveRefused, match="end"):
        await open_one(other)
    assert not draining.done()
    await host.close_module("m")
    await draining


async def test_what_no_host_sends_ends_the_link() -> None:
    network = MemoryNetwork()
    far = make_transport("memory", "host", b"secret", network=network)
    near = make_transport("memory", "home", b"secret", network=network)
    listener = await far.listen("here")
    link, calls = [await near.connect(listener.address, timeout_seconds=SECONDS) for _ in range(2)]
    left = list[bool]()
    host = HostLink(
        link,
        HostCalls(
            calls,
            wake=lambda: None,
            on_call_done=lambda seconds: None,
            on_lost=lambda calls, why: None,
            timeout_seconds=SECONDS,
        ),
        fingerprint="same",
        on_leaving=lambda: left.append(True),
        timeout_seconds=SECONDS,
        ping_seconds=SECONDS,
    )
    peer = await listener.accept()
    await peer.send(*encode(Leaving()), timeout_seconds=SECONDS)
    await peer.send(*encode(Ping()), timeout_seconds=SECONDS)
    assert "Ping" in await host.serve()
    assert left == [True]
    assert host.calls.lost
    await near.close()
    await far.close()


async def test_a_host_that_never_answers_an_ask_is_given_up(scene: Scene) -> None:
    scene.hosting.may_open.clear()
    scene.hosting.answerer = lambda call, answer: None
    host = await scene.home(timeout_seconds=0.3)
    with pytest.raises(HostLost, match="did not answer"):
        await open_one(host)
    with pytest.raises(HostLost, match="did not answer"):
        await host.settle()


async def test_a_result_changes_no_more_when_its_frame_is_gone(scene: Scene) -> None:
    def echo(call: HostedCall, answer: Answer) -> None:
        answer.give(call.hidden if isinstance(call, RunLayers) else torch.empty(0))

    scene.hosting.answerer = echo
    host = await scene.home()
    sent = [torch.full((40, 8), float(n)) for n in range(20)]
    answers = [host.call(RunLayers("m", one)) for one in sent]
    await scene.until(lambda: all(one.is_done for one in answers))
    assert all(torch.equal(one.result(), hidden) for one, hidden in zip(answers, sent, strict=True))


async def test_calls_to_a_host_that_takes_nothing_in_are_done_when_there_is_room_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_calls, "MAX_UNSENT_BYTES", 1000)
    host = await scene.home()
    await host.settle()
    scene.network.freeze()
    blocks = WriteBlocks("m", None, np.zeros(1, dtype=np.int64), torch.zeros(1000))
    answers = [host.call(blocks)]
    while answers[-1].is_done and len(answers) < 200:
        await asyncio.sleep(0)
        answers.append(host.call(blocks))
    assert not answers[-1].is_done
    scene.network.thaw()
    await scene.until(lambda: answers[-1].is_done)
    await host.settle()
    assert sum(isinstance(call, WriteBlocks) for call in scene.hosting.calls) == len(answers)


async def test_a_caller_that_waits_for_room_is_let_go_when_the_link_ends(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_calls, "MAX_UNSENT_BYTES", 1000)
    host = await scene.home(timeout_seconds=0.5)
    await host.settle()
    scene.network.freeze()
    blocks = WriteBlocks("m", None, np.zeros(1, dtype=np.int64), torch.zeros(1000))
    answer = host.call(blocks)
    for _ in range(300):  # more than a Link takes without a frame given back
        await asyncio.sleep(0)
        if answer.is_done:
            answer = host.call(blocks)
    assert not answer.is_done
    await scene.until(lambda: host.calls.lost)
    for late in (answer, host.call(blocks)):
        with pytest.raises(HostLost):
            late.result()
    scene.network.thaw()


async def test_a_module_that_is_closed_before_its_layer_is_built_harms_nobody(scene: Scene) -> None:
    host = await scene.home()
    await open_one(host, has_weights=True)
    tensors = layer_tensors(scene.model.layer(0)).items()
    asked = [asyncio.ensure_future(host.send_weights("m", 0, *piece)) for piece in whole(tensors)]
    scene.network.freeze()
    closing = asyncio.ensure_future(host.close_module("m"))
    await asyncio.wait(asked, timeout=0.05)
    scene.network.thaw()  # all comes to the host at once, before it gets to build anything
    await asyncio.gather(*asked, closing)
    assert not scene.hosting.modules
    assert await open_one(host, "n") == 9


async def test_a_frame_is_given_back_when_its_blocks_are_written(scene: Scene) -> None:
    written: list[Answer] = []

    def keep(call: HostedCall, answer: Answer) -> None:
        if isinstance(call, Settle):
            answer.give(torch.empty(0))
        else:
            written.append(answer)

    scene.hosting.answerer = keep
    host = await scene.home()
    for _ in range(64):  # all that a Link takes without a frame given back
        host.call(WriteBlocks("m", None, np.zeros(1, dtype=np.int64), torch.zeros(10)))
    await scene.until(lambda: len(written) == 64)
    settling = asyncio.ensure_future(host.settle())
    done, _ = await asyncio.wait({settling}, timeout=0.05)
    assert not done
    for answer in written:
        answer.give(torch.empty(0))
    await settling
