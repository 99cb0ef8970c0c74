"""What every Link does for those who wait for nothing: `post` and `deliver`."""

import asyncio
import time

import pytest
from link_pair import BODY_SIZES, LIMITS, SECONDS, Pair, random_body, send

from libs.engine.thread_loop import ThreadLoop
from libs.transport.choose import TransportKind, make_transport
from libs.transport.port import Link, LinkError, LinkLost, LinkTimeout, Received


class Heard:
    """What a Link delivers."""

    def __init__(self, link: Link, *, releases: bool = True) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.lost: list[LinkLost] = []
        self.held: list[Received] = []
        self._releases = releases
        link.deliver(self._take, self.lost.append)

    def _take(self, frame: Received) -> None:
        self.frames.append((frame.header, frame.body.tobytes()))
        if self._releases:
            frame.release()
        else:
            self.held.append(frame)

    async def until(self, num_frames: int) -> None:
        async with asyncio.timeout(SECONDS):
            while len(self.frames) < num_frames and not self.lost:  # noqa: ASYNC110 - told by no event
                await asyncio.sleep(0.001)


async def test_what_is_posted_and_sent_is_delivered_in_one_order_also_what_waited_before(pair: Pair) -> None:
    bodies = [random_body(size) for size in BODY_SIZES]
    told: list[LinkError | None] = []
    await send(pair.near, b"first")
    heard = Heard(pair.far)
    for number, body in enumerate(bodies):
        pair.near.post(str(number).encode(), body, told.append, timeout_seconds=SECONDS)
    await send(pair.near, b"last", random_body(3))
    await heard.until(len(bodies) + 2)
    assert [header for header, _ in heard.frames] == [b"first", *b"0 1 2 3 4 5 6".split(), b"last"]
    assert [body for _, body in heard.frames[1:-1]] == [body.tobytes() for body in bodies]
    assert told == [None] * len(bodies)


async def test_posts_beyond_the_window_wait_until_frames_are_released(pair: Pair) -> None:
    heard = Heard(pair.far, releases=False)
    for number in range(3 * LIMITS.window_frames):
        pair.near.post(str(number).encode(), random_body(10), lambda error: None, timeout_seconds=SECONDS)
    await heard.until(LIMITS.window_frames)
    assert len(heard.frames) == LIMITS.window_frames
    while len(heard.frames) < 3 * LIMITS.window_frames:
        num_before = len(heard.frames)
        while heard.held:
            heard.held.pop().release()
        await heard.until(num_before + 1)
    assert [int(header) for header, _ in heard.frames] == list(range(3 * LIMITS.window_frames))
    while heard.held:
        heard.held.pop().release()


async def test_a_lost_link_is_told_once_and_takes_no_posts(pair: Pair) -> None:
    heard = Heard(pair.near)
    told: list[LinkError | None] = []
    for _ in range(2 * LIMITS.window_frames):
        pair.near.post(b"", random_body(10), told.append, timeout_seconds=SECONDS)
    await pair.transports[1].close()
    await heard.until(1)
    assert len(heard.lost) == 1
    async with asyncio.timeout(SECONDS):
        while len(told) < 2 * LIMITS.window_frames:  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0.001)
    assert isinstance(told[-1], LinkLost)
    with pytest.raises(LinkLost):
        pair.near.post(b"", None, told.append, timeout_seconds=SECONDS)
    late = Heard(pair.near)
    assert len(late.lost) == 1


async def test_a_post_that_gets_no_credit_is_over_at_its_deadline_and_the_link_with_it(pair: Pair) -> None:
    heard = Heard(pair.near)
    told: list[LinkError | None] = []
    for _ in range(LIMITS.window_frames):
        await send(pair.near, b"h", random_body(10))
    pair.near.post(b"h", random_body(10), told.append, timeout_seconds=0.05)
    await heard.until(1)
    assert [type(error) for error in told] == [LinkTimeout]
    assert not pair.near.is_open


@pytest.mark.parametrize("kind", ["shm", "ucx"])
def test_a_loop_that_is_turned_now_and_then_carries_links_and_takes_posts_in_between(
    kind: TransportKind,
) -> None:
    """As the thread of an engine does, to which nothing tells that something has come."""
    turned = ThreadLoop()

    async def joined() -> Pair:
        near, far = (make_transport(kind, name, b"secret", limits=LIMITS) for name in ("near", "far"))
        listener = await far.listen("127.0.0.1")
        near_link = await near.connect(listener.address, timeout_seconds=SECONDS)
        return Pair(near_link, await listener.accept(), (near, far))

    pair = turned.loop.run_until_complete(joined())
    asked, answered = Heard(pair.far), Heard(pair.near)
    for size in BODY_SIZES:
        body = random_body(size)
        pair.near.post(b"ask", body, lambda error: None, timeout_seconds=SECONDS)
        for link, heard in ((pair.far, asked), (pair.near, answered)):
            deadline = time.monotonic() + SECONDS
            while not heard.frames and time.monotonic() < deadline:
                turned.sleep(0.01)
            assert heard.frames.pop()[1] == body.tobytes()
            if link is pair.far:
                link.post(b"answer", body, lambda error: None, timeout_seconds=SECONDS)
    for transport in pair.transports:
        turned.loop.run_until_complete(transport.close())
    turned.close()


async def test_posts_of_one_burst_each_have_their_time(pair: Pair) -> None:
    heard = Heard(pair.far, releases=False)
    told: list[LinkError | None] = []
    num_posts = 4 * LIMITS.window_frames
    for _ in range(num_posts):
        pair.near.post(b"h", random_body(10), told.append, timeout_seconds=0.5)
    while len(told) < num_posts and not any(told):
        await asyncio.sleep(0.2)  # takes longer for all of them than each may
        while heard.held:
            heard.held.pop().release()
    assert told == [None] * num_posts


async def test_the_time_of_a_post_on_a_quiet_link_begins_with_it(pair: Pair) -> None:
    heard = Heard(pair.far, releases=False)
    told: list[LinkError | None] = []
    for _ in range(LIMITS.window_frames + 1):  # one waits, and with it somebody looks after them
        pair.near.post(b"h", random_body(10), told.append, timeout_seconds=0.4)
    await heard.until(LIMITS.window_frames)
    heard.held.pop().release()
    while heard.held:
        heard.held.pop().release()
    await heard.until(LIMITS.window_frames + 1)
    await asyncio.sleep(0.35)
    for _ in range(LIMITS.window_frames):
        pair.near.post(b"h", random_body(10), told.append, timeout_seconds=0.4)
    await asyncio.sleep(0.15)  # beyond the time of the first ones
    assert pair.near.is_open
    while heard.held:
        heard.held.pop().release()


async def test_a_frame_that_cannot_be_taken_in_ends_the_link_and_no_other(pair: Pair) -> None:
    lost: list[LinkLost] = []

    def refuse(frame: Received) -> None:
        frame.release()
        raise ValueError("nobody can read this")

    pair.far.deliver(refuse, lost.append)
    await send(pair.near, b"h")
    async with asyncio.timeout(SECONDS):
        while not lost:  # noqa: ASYNC110 - told by no event
            await asyncio.sleep(0.001)
    assert "nobody can read this" in str(lost[0])
    assert not pair.far.is_open
