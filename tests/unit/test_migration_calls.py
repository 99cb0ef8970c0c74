"""Both ends of the Link that brings calls to a host: garbage, bounds, memory, and how they end."""

import asyncio
from collections.abc import AsyncGenerator

import numpy as np
import pytest
import torch
from hosting_links_scene import SECONDS, Scene, open_one

from libs.engine.hosting.calls import HostedCall, RunLayers, Settle, WriteBlocks
from libs.engine.hosting.port import Answer, HostLost
from libs.worker.migration.framing import encode
from libs.worker.migration.owner import remote_host
from libs.worker.migration.protocol import Call, Ping, Result


@pytest.fixture
async def scene() -> AsyncGenerator[Scene]:
    scene = Scene()
    await scene.open()
    yield scene
    await scene.close()


@pytest.mark.parametrize(
    "frame",
    [
        (b"nonsense", np.zeros(3, dtype=np.uint8)),
        encode(Ping()),
        encode(Call(call_id=0, call=Settle())),
        encode(Call(call_id=1, call=WriteBlocks("m", None, np.zeros(1, dtype=np.int64), torch.zeros(1)))),
        encode(Result(call_id=1, tensor=torch.ones(1))),
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
    monkeypatch.setattr(remote_host, "MAX_UNSENT_BYTES", 1000)
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
    monkeypatch.setattr(remote_host, "MAX_UNSENT_BYTES", 1000)
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
