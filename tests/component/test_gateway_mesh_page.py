"""The live page: its files, and the events that it follows."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from gateway_mesh import Mesh, running_gateway
from memory_broker import MemoryBroker
from memory_bus import MemoryBus
from prometheus_client import CollectorRegistry

from libs.bus.messages.presence import ServiceKind
from libs.cost.load import WorkerLoad
from libs.runtime.http_server import HttpServer
from services.gateway.api.errors import Overloaded, Unavailable
from services.gateway.mesh.mesh_feed import MeshFeed
from services.gateway.mesh.mesh_page import MeshEvents
from services.gateway.metrics import GatewayMetrics

KEY = "sk-one"


@pytest.fixture
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    broker = MemoryBroker()
    settings = getattr(request, "param", {})
    async with running_gateway(MemoryBus(broker), MemoryBus(broker), **settings) as mesh:
        yield mesh


with_keys = pytest.mark.parametrize("mesh", [{"api_key": (KEY,)}], indirect=True, ids=["keys"])


async def events_of(answer: httpx.Response) -> AsyncGenerator[tuple[str, Any]]:
    name = "message"
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
            name = "message"


@asynccontextmanager
async def events(mesh: Mesh, **headers: str) -> AsyncIterator[AsyncGenerator[tuple[str, Any]]]:
    async with (
        mesh.http() as http,
        http.stream("GET", "/v1/mesh/events", headers=headers) as answer,
        aclosing(events_of(answer)) as told,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        yield told


def states(snapshot: dict[str, Any]) -> dict[str, str]:
    return {service["name"]: service["state"] for service in snapshot["services"]}


class References(HTMLParser):
    """What a page loads, links to and names, and whether its tags match."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.ids: list[str] = []
        self.labelled_by: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        self.urls += [told[name] for name in ("src", "href", "action") if name in told]
        self.ids += [told["id"]] if "id" in told else []
        self.labelled_by += [told[name] for name in ("for", "aria-labelledby") if name in told]
        assert not any(name == "style" or name.startswith("on") for name in told), (
            "not under the page's policy"
        )
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


async def test_the_page_parses_and_all_that_it_refers_to_is_served_here(mesh: Mesh) -> None:
    async with mesh.http() as http:
        page = await http.get("/mesh")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        found = References()
        found.feed(page.text)
        assert not found.open
        assert len(set(found.ids)) == len(found.ids)
        assert set(found.labelled_by) <= set(found.ids)
        to_read = [urljoin("/mesh", url) for url in found.urls if url != "data:,"]
        assert sorted(to_read) == ["/mesh/page.css", "/mesh/page.js", "/mesh/placement.css"]
        modules = ("cards", "follow", "memory", "moves", "placement", "workers")
        for path in (*(f"/mesh/{name}.js" for name in modules), *to_read):
            answer = await http.get(path)
            assert answer.status_code == 200
            kind = "css" if path.endswith("css") else "javascript"
            assert answer.headers["content-type"] == f"text/{kind}; charset=utf-8"
            assert "//" not in answer.text.replace(" // ", "").replace("\n// ", "").removeprefix("// "), path
            assert "url(" not in answer.text
        assert (await http.get("/mesh/settings.py")).status_code == 404
        assert (await http.head("/v1/mesh/events")).status_code == 200


async def test_a_snapshot_comes_at_once_and_is_what_the_mesh_says(mesh: Mesh) -> None:
    await mesh.decodes[0].report(WorkerLoad(num_running=3, num_blocks=10))
    async with events(mesh) as told, mesh.http() as http:
        name, snapshot = await anext(told)
        asked = (await http.get("/v1/mesh")).json()
    assert name == "message"
    assert snapshot.keys() == asked.keys() >= {"services", "totals", "models", "reasons"}
    assert states(snapshot) == states(asked)
    assert snapshot["totals"]["num_running"] == 3


async def test_a_worker_that_comes_or_goes_is_told_before_the_second_is_over(mesh: Mesh) -> None:
    async with events(mesh) as told:
        for _ in range(2):  # from here on a snapshot is a second away unless something changes
            await anext(told)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await mesh.decodes[0].die()
        _, snapshot = await anext(told)
        assert "decode-0" not in states(snapshot)
        assert "no decode worker is ready" in snapshot["reasons"]
        assert loop.time() - begun < 0.8
        await mesh.add(ServiceKind.DECODE_WORKER, "decode-1")
        async for _, snapshot in told:
            if "decode-1" in states(snapshot):
                break


async def test_a_gateway_that_drains_says_so_and_ends_the_stream(mesh: Mesh) -> None:
    assert mesh.stop is not None
    async with events(mesh) as told:
        await anext(told)
        mesh.stop.asked.set()
        last = [event async for event in told][-1]
    assert last == ("end", {"reason": "this gateway is shutting down"})


async def test_who_leaves_is_not_counted_any_more(mesh: Mesh) -> None:
    async with events(mesh) as told:
        await anext(told)
        assert await mesh.metric("kvmesh_mesh_viewers") == 1
    async with asyncio.timeout(10):
        while await mesh.metric("kvmesh_mesh_viewers"):  # noqa: ASYNC110 - gauges announce nothing
            await asyncio.sleep(0.01)


@with_keys
async def test_with_keys_the_page_is_open_and_the_mesh_is_not(mesh: Mesh) -> None:
    async with mesh.http() as http:
        assert "API key" in (await http.get("/mesh")).text
        assert (await http.get("/mesh/page.js")).status_code == 200
        for headers in ({}, {"authorization": "Bearer sk-two"}):
            refused = await http.get("/v1/mesh/events", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    async with events(mesh, authorization=f"Bearer {KEY}") as told:
        assert "decode-0" in states((await anext(told))[1])


# The feed alone


class Counted:
    """Snapshots with their numbers in them."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self) -> bytes:
        self.num_made += 1
        return str(self.num_made).encode()


@asynccontextmanager
async def running(feed: MeshFeed) -> AsyncIterator[None]:
    task = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_many_viewers_share_each_snapshot_and_nobody_causes_none() -> None:
    snapshot = Counted()
    feed = MeshFeed(snapshot)

    async def view() -> list[bytes]:
        got, number = [], 0
        with feed.viewer():
            while len(got) < 3:
                came = await feed.after(number)
                assert came is not None
                number, data = came
                got.append(data)
        return got

    async with running(feed):
        assert snapshot.num_made == 0
        all_got = await asyncio.gather(*(view() for _ in range(50)))
        assert all(got == [b"1", b"2", b"3"] for got in all_got)
        assert (snapshot.num_made, feed.num_viewers) == (3, 0)


async def test_who_is_late_gets_the_newest_alone() -> None:
    feed = MeshFeed(Counted())
    async with running(feed):
        with feed.viewer():
            number, _ = await feed.after(0) or (0, b"")
            for _ in range(2):
                feed.changed()
                number, _ = await feed.after(number) or (0, b"")
            assert await feed.after(0) == (3, b"3")


async def test_who_comes_after_a_pause_gets_no_old_news() -> None:
    feed = MeshFeed(Counted())
    async with running(feed):
        with feed.viewer():
            assert await feed.after(0) == (1, b"1")
        with feed.viewer():
            assert await feed.after(0) == (2, b"2")


async def test_viewers_are_bounded_and_none_is_taken_while_draining() -> None:
    feed = MeshFeed(Counted(), max_viewers=1)
    with feed.viewer(), pytest.raises(Overloaded, match="1 viewers"), feed.viewer():
        pass
    feed.close()
    assert await feed.after(0) is None
    with pytest.raises(Unavailable), feed.viewer():
        pass


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_a_viewer_that_does_not_read_is_cut_off_and_holds_nothing_more(num_read: int) -> None:
    metrics = GatewayMetrics(registry := CollectorRegistry())
    snapshot = Counted()
    feed, sent = MeshFeed(snapshot), list[dict[str, Any]]()

    async def send(message: Any) -> None:
        if len(sent) > num_read:
            await never()
        sent.append(message)
        feed.changed()

    async with running(feed), asyncio.timeout(10):
        await MeshEvents(feed, metrics, 0.3)({"type": "http"}, never, send)
    assert [m["body"] for m in sent[1:]] == [b"data: %d\n\n" % (n + 1) for n in range(num_read)]
    assert feed.num_viewers == 0
    assert registry.get_sample_value("kvmesh_slow_clients_total") == 1


async def test_one_slow_viewer_does_not_keep_the_others_waiting() -> None:
    metrics, feed = GatewayMetrics(CollectorRegistry()), MeshFeed(Counted())
    got = asyncio.Queue[bytes](10)

    async def slow(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never()

    async def quick(message: Any) -> None:
        if message["type"] == "http.response.body":
            await got.put(message["body"])
            feed.changed()

    async with running(feed), asyncio.timeout(10), asyncio.TaskGroup() as group:
        viewers = [
            group.create_task(MeshEvents(feed, metrics, 5.0)({"type": "http"}, never, send))
            for send in (slow, quick)
        ]
        assert [await got.get() for _ in range(4)] == [b"data: %d\n\n" % n for n in range(1, 5)]
        assert feed.num_viewers == 2
        for viewer in viewers:
            viewer.cancel()
    assert feed.num_viewers == 0


async def test_over_a_real_connection_a_slow_viewer_gets_a_broken_stream_and_no_more() -> None:
    metrics = GatewayMetrics(registry := CollectorRegistry())
    num_made = 0

    def snapshot() -> bytes:
        nonlocal num_made
        num_made += 1
        feed.changed()
        return b"x" * (16 << 20)  # more than the kernel keeps for a connection

    feed = MeshFeed(snapshot)
    server = HttpServer(MeshEvents(feed, metrics, 0.3), host="127.0.0.1", port=0)
    url = await server.open()
    async with running(feed), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
        writer.write(b"GET /v1/mesh/events HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readline()
        while not registry.get_sample_value("kvmesh_slow_clients_total"):  # noqa: ASYNC110 - as Prometheus does
            await asyncio.sleep(0.01)
        assert feed.num_viewers == 0
        rest = await reader.read(-1)
        writer.close()
    assert rest.count(b"x") < (32 << 20)
    assert b"event: end" not in rest
    await server.close()
