"""Both ends of the Link between a home and a host: refusals, garbage, weights and leases."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

import numpy as np
import pytest
import torch
from hosting_links_scene import SECONDS, Scene, open_one
from memory_transport import MemoryNetwork, any_transport

from libs.engine.errors import MoveRefused, NoRoom
from libs.engine.hosting.calls import RunLayers, Settle
from libs.engine.hosting.port import HostLost
from libs.model.layer import layer_bytes
from libs.model.layer_weights import layer_tensors
from libs.worker.migration.framing import encode
from libs.worker.migration.owner.remote_host import HostCalls, RemoteHost
from libs.worker.migration.protocol import Call, Leaving, Opened, Ping, WeightPiece


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncGenerator[Scene]:
    scene = Scene(getattr(request, "param", torch.float32))
    await scene.open()
    yield scene
    await scene.close()


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
        encode(Call(call_id=0, call=Settle())),
        encode(Call(call_id=1, call=RunLayers("m", torch.ones(1)))),
        encode(
            WeightPiece(ask_id=1, move_id="m", layer=0, name="qkv.weight", first_byte=0, piece=torch.ones(1))
        ),
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
    far = any_transport("memory", "host", b"secret", network=network)
    near = any_transport("memory", "home", b"secret", network=network)
    listener = await far.listen("here")
    link, calls = [await near.connect(listener.address, timeout_seconds=SECONDS) for _ in range(2)]
    left = list[bool]()
    host = RemoteHost(
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
