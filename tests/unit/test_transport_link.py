"""One end of a Link on a wire that only records: deadlines, queueing, credits, the end; in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from libs.transport.credits import Credit, LinkLimits
from libs.transport.link import CLOSE_SECONDS, PeerLink
from libs.transport.memory import NO_BODY, as_memory
from libs.transport.port import LinkLost, LinkTimeout
from libs.transport.wire import Sending

Run = Callable[[Coroutine[Any, Any, Any]], Any]
LIMITS = LinkLimits(window_frames=4, window_bytes=800, max_body_bytes=5000)


class RecordingWire:
    """Keeps what it is given; the test says what becomes of it."""

    def __init__(self) -> None:
        self.posted: list[Sending] = []
        self.credits: list[Credit] = []
        self.told: list[Credit] = []
        self.num_closes = self.num_aborts = 0

    def post(self, sending: Sending, credit: Credit) -> None:
        self.posted.append(sending)
        self.credits.append(credit)

    def tell(self, credit: Credit) -> None:
        self.told.append(credit)

    def post_close(self) -> None:
        self.num_closes += 1

    def abort(self) -> None:
        self.num_aborts += 1


class Harness:
    """A Link, its wire, and the sends that the test started."""

    def __init__(self) -> None:
        self.wire, self.gone = RecordingWire(), list[PeerLink]()
        self.link = PeerLink("peer", LIMITS, LIMITS, self.gone.append)
        self.link.attach(self.wire)

    async def send(self, num_bytes: int = 0, timeout_seconds: float = 10.0) -> "asyncio.Task[None]":
        body = np.zeros(num_bytes, dtype=np.uint8)
        task = asyncio.ensure_future(self.link.send(b"h", body, timeout_seconds=timeout_seconds))
        await asyncio.sleep(0)
        return task

    def arrive(self, num_bytes: int = 0, give_back: Callable[[], None] | None = None) -> None:
        assert self.link.on_arriving(num_bytes)
        body = as_memory(np.zeros(num_bytes, dtype=np.uint8)) if num_bytes else NO_BODY
        self.link.on_frame(b"h", body, give_back)


def test_a_send_that_is_not_taken_ends_at_its_deadline_and_takes_the_link_with_it(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        late, patient = await h.send(10, 1.0), await h.send(10, 99.0)
        receiving = asyncio.ensure_future(h.link.receive())
        begun = asyncio.get_running_loop().time()
        with pytest.raises(LinkTimeout, match="a send of 10 bytes to peer was not taken within"):
            await late
        assert asyncio.get_running_loop().time() - begun == pytest.approx(1.0)
        for other in (patient, receiving):
            with pytest.raises(LinkLost, match="passed its deadline"):
                await other
        assert (h.wire.num_aborts, h.gone) == (1, [h.link])

    run_virtually(scenario())


def test_a_deadline_in_the_turn_in_which_a_send_was_taken_costs_nothing(run_virtually: Run) -> None:
    async def scenario() -> None:
        h, loop = Harness(), asyncio.get_running_loop()
        loop.call_at(loop.time() + 1.0, lambda: h.link.on_sent(h.wire.posted[0]))
        await (await h.send(10, 1.0))
        assert (h.link.is_open, h.wire.num_aborts) == (True, 0)

    run_virtually(scenario())


def test_a_send_that_gets_no_credit_says_so(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        for _ in range(4):
            await h.send()
            h.link.on_sent(h.wire.posted[-1])
        with pytest.raises(LinkTimeout, match="got no credit: the peer does not consume"):
            await (await h.send(0, 1.0))
        assert len(h.wire.posted) == 4

    run_virtually(scenario())


def test_sends_are_posted_in_call_order_also_when_a_later_one_would_fit(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        sizes = (700, 600, 1)
        for size in sizes:
            await h.send(size)
        assert [s.body.num_bytes for s in h.wire.posted] == [700]
        h.link.on_credit(Credit(1, 700))
        assert [s.body.num_bytes for s in h.wire.posted] == list(sizes)

    run_virtually(scenario())


def test_a_queued_send_that_is_cancelled_lets_the_next_one_through(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        await h.send(700)
        large, small = await h.send(600), await h.send(1)
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        assert [s.body.num_bytes for s in h.wire.posted] == [700, 1]
        h.link.on_sent(h.wire.posted[1])
        await small

    run_virtually(scenario())


def test_a_posted_send_that_is_cancelled_waits_for_its_end_but_not_beyond_its_deadline(
    run_virtually: Run,
) -> None:
    async def scenario() -> None:
        h = Harness()
        sending = await h.send(10, 5.0)
        for _ in range(2):
            sending.cancel()
            await asyncio.sleep(1.0)
            assert not sending.done()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)

    run_virtually(scenario())


def test_frames_carry_the_credit_and_it_is_told_alone_only_when_due(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        h.arrive(5)
        (await h.link.receive()).release()
        assert h.wire.told == []
        await h.send()
        assert h.wire.credits == [(1, 5)]
        for _ in range(2):
            h.arrive(5)
            (await h.link.receive()).release()
        assert h.wire.told == [(3, 15)]

    run_virtually(scenario())


def test_a_frame_beyond_the_window_ends_the_link(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        for _ in range(4):
            h.arrive()
        assert not h.link.on_arriving(0)
        for _ in range(4):
            await h.link.receive()
        with pytest.raises(LinkLost, match="beyond its credit"):
            await h.link.receive()

    run_virtually(scenario())


def test_a_close_waits_for_what_is_under_way_then_tells_the_peer_and_waits_for_it(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        sending = await h.send(10)
        closing = asyncio.ensure_future(h.link.close())
        await asyncio.sleep(0)
        assert (h.wire.num_closes, h.link.is_open) == (0, False)
        h.link.on_sent(h.wire.posted[0])
        await sending
        assert (h.wire.num_closes, h.wire.num_aborts) == (1, 0)
        h.link.lose(LinkLost("the peer hung up"))
        await closing
        assert h.wire.num_aborts == 1

    run_virtually(scenario())


def test_a_close_gives_a_silent_peer_up_after_a_while(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        await asyncio.gather(h.link.close(), h.link.close())
        assert asyncio.get_running_loop().time() == pytest.approx(CLOSE_SECONDS)
        assert (h.wire.num_closes, h.wire.num_aborts) == (1, 1)

    run_virtually(scenario())


def test_sends_that_wait_for_credit_fail_when_the_link_closes(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        await h.send(700)
        waiting = await h.send(600)
        closing = asyncio.ensure_future(h.link.close())
        with pytest.raises(LinkLost, match="this side closed"):
            await waiting
        await closing

    run_virtually(scenario())


def test_buffers_come_back_whatever_becomes_of_their_frames(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        back: list[str] = []
        h.arrive(5, lambda: back.append("released"))
        h.arrive(5, lambda: back.append("never received"))
        assert h.link.on_arriving(5)
        (await h.link.receive()).release()
        h.link.lose(LinkLost("gone"))
        h.link.on_frame(b"h", NO_BODY, lambda: back.append("too late"))
        await h.link.close()
        assert back == ["released", "too late", "never received"]

    run_virtually(scenario())


def test_frames_that_came_before_a_loss_can_still_be_received(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        h.arrive()
        h.link.lose(LinkLost("killed"))
        assert (await h.link.receive()).header == b"h"
        with pytest.raises(LinkLost, match="killed"):
            await h.link.receive()

    run_virtually(scenario())


def test_receivers_are_served_in_the_order_they_came(run_virtually: Run) -> None:
    async def scenario() -> None:
        h = Harness()
        receivers = [asyncio.ensure_future(h.link.receive(timeout_seconds=t)) for t in (9.0, 1.0, 9.0)]
        await asyncio.sleep(2.0)
        with pytest.raises(LinkTimeout, match="no frame from peer within"):
            await receivers[1]
        h.arrive()
        await asyncio.sleep(0.1)
        assert sum(receiver.done() for receiver in receivers) == 2
        h.arrive()
        await asyncio.gather(receivers[0], receivers[2])

    run_virtually(scenario())
