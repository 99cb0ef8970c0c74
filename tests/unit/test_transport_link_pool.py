"""One connection for each peer, however many ask for it; requests that wait for answers over a Link."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from libs.transport.link_pool import LinkPool, LinkRequests
from libs.transport.port import LinkLost


class Connection:
    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self.reason.done()

    def lose(self, reason: str) -> None:
        if self.is_open:
            self.reason.set_result(reason)

    async def serve(self) -> str:
        return await self.reason

    async def close(self) -> None:
        self.lose("closed")


class Scene:
    """A pool, and a way to connect that may be slow."""

    def __init__(self) -> None:
        self.ended: list[tuple[Connection, str, bool]] = []
        self.made: list[Connection] = []
        self.may_connect = asyncio.Event()
        self.may_connect.set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.pool: LinkPool[Connection] = LinkPool(
            self.spawn, lambda connection, why, is_dropped: self.ended.append((connection, why, is_dropped))
        )

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    async def make(self) -> Connection:
        await self.may_connect.wait()
        self.made.append(Connection())
        return self.made[-1]

    async def connect(self, peer: str = "peer") -> Connection:
        return await self.pool.connect(peer, self.make)

    async def all_done(self) -> None:
        """Returns when everything that was spawned for connections that are over has ended."""
        await asyncio.wait_for(asyncio.gather(*self.tasks), 5)


async def test_all_who_ask_at_once_get_the_same_connection_and_peers_have_their_own() -> None:
    scene = Scene()
    one, other, third = await asyncio.gather(scene.connect(), scene.connect(), scene.connect("third"))
    assert one is other is scene.pool.get("peer")
    assert third is scene.pool.get("third") is not one
    assert scene.pool.peers() == {"peer", "third"}


async def test_a_lost_connection_is_told_of_and_made_anew() -> None:
    scene = Scene()
    first = await scene.connect()
    first.lose("the peer is gone")
    assert scene.pool.get("peer") is None
    second = await scene.connect()  # before anybody took note of the first one's end
    second.lose("again")
    await scene.all_done()
    assert scene.ended == [(first, "the peer is gone", False), (second, "again", False)]
    assert scene.pool.peers() == set()


async def test_a_dropped_connection_is_closed_and_its_end_told_as_such() -> None:
    scene = Scene()
    first = await scene.connect()
    assert scene.pool.drop("peer") is first
    assert scene.pool.drop("peer") is None
    await scene.all_done()
    assert scene.ended == [(first, "closed", True)]
    assert await scene.connect() is not first


async def test_a_peer_that_is_dropped_while_it_is_being_reached_leaves_nothing_behind() -> None:
    scene = Scene()
    scene.may_connect.clear()
    connecting, waiting = (asyncio.ensure_future(scene.connect()) for _ in range(2))
    await asyncio.sleep(0)
    assert scene.pool.is_connecting("peer")
    scene.pool.drop("peer")
    assert not scene.pool.is_connecting("peer")
    scene.may_connect.set()
    for task in (connecting, waiting):
        with pytest.raises(LinkLost, match="given up"):
            await task
    await scene.all_done()
    assert [one.is_open for one in scene.made] == [False]
    assert scene.pool.peers() == set()
    assert scene.pool.get("peer") is None


async def test_who_cannot_be_reached_is_tried_again() -> None:
    scene = Scene()

    async def fail() -> Connection:
        raise LinkLost("nobody is there")

    with pytest.raises(LinkLost, match="nobody"):
        await scene.pool.connect("peer", fail)
    assert await scene.connect() is scene.pool.get("peer")


def test_an_answer_finds_who_waits_once() -> None:
    requests: LinkRequests[str, LinkLost] = LinkRequests()
    one, two = requests.add("one"), requests.add("two")
    assert requests.get(two) == "two"
    assert (requests.take(one), requests.take(one), requests.get(one)) == ("one", None, None)
    assert requests.lose(LinkLost("gone"))[1] == ["two"]


def test_after_the_link_nobody_waits_and_the_first_reason_counts() -> None:
    requests: LinkRequests[str, LinkLost] = LinkRequests()
    requests.add("one")
    first = LinkLost("first")
    assert requests.lose(first) == (first, ["one"])
    assert requests.lose(LinkLost("second")) == (first, [])
    assert requests.lost is first
    with pytest.raises(LinkLost, match="first"):
        requests.add("late")
