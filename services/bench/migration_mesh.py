"""A mesh that is watched from both ends while modules of one worker move: tokens as clients see them, and
token frames as the worker publishes them."""

import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from libs.bus.messages.generation import TokenFrame
from libs.bus.nats_bus import NatsBus
from libs.bus.nats_server import NatsServer
from libs.bus.port import Bus
from services.bench.mesh_overhead import running_mesh

NUM_STREAMS = 16
PROMPT = "A story about {number} people of a small town, told slowly and in plain words.\n"
"""Plain words have plain answers: each of their tokens is text, and clients see it. Bytes of a character that
is not whole yet are no text, and would look like a gap."""
ANSWER_TOKENS = 1900
"""More than there is time for."""
SESSION = "bench"
"""All streams are of one session, which stays with one decode worker: the home."""
_LOOK_SECONDS = 0.03
_START_SECONDS = 60.0


@dataclass
class Arrivals:
    """Times of what arrived, in seconds of `time.perf_counter`."""

    times: list[float] = field(default_factory=list[float])

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between arrivals, where any part of the gap lies in the span."""
        return [later - sooner for sooner, later in pairwise(self.times) if later > begin and sooner < end]


def longest_gap(arrivals: Sequence[Arrivals], begin: float, end: float) -> float:
    """Of any of them within the span; infinite where nothing arrived at all."""
    return max((gap for one in arrivals for gap in one.gaps(begin, end)), default=float("inf"))


def median_gap(arrivals: Arrivals, begin: float, end: float) -> float:
    """Of those within the span."""
    return statistics.median(arrivals.gaps(begin, end) or [float("nan")])


@dataclass
class WatchedMesh:
    """One prefill and two decode workers with a coordinator that moves nothing by itself."""

    client: httpx.AsyncClient
    link_secret: str
    admin_key: str
    streams: list[Arrivals] = field(default_factory=list[Arrivals])
    """As clients see them."""
    num_prompt_tokens: int = 0
    """Of each."""
    frames: Arrivals = field(default_factory=Arrivals)
    """Of the home, one for each of its steps."""
    home: dict[str, Any] = field(default_factory=dict[str, Any])
    host: dict[str, Any] = field(default_factory=dict[str, Any])
    """The decode workers' presences, with their loads."""

    async def move(self, module: dict[str, Any]) -> dict[str, Any]:
        """Its record when it is over. Raises RuntimeError where it fails."""
        asked = {"instance": self.home["incarnation"], **module}
        if "return_of" not in module:
            asked["host"] = self.host["incarnation"]
        headers = {"authorization": f"Bearer {self.admin_key}"}
        answer = await self.client.post("/v1/mesh/migrations", json=asked, headers=headers)
        if answer.status_code != 202:
            raise RuntimeError(f"{asked} was refused: {answer.text}")
        while True:
            record = (await self.client.get(answer.headers["location"])).json()
            if record["is_over"]:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if record["phase"] != "done":
            raise RuntimeError(f"{record['what']} did not move: {record['error']}")
        return dict(record)

    def num_live_blocks(self, block_size: int) -> int:
        """Blocks that the streams hold now."""
        return sum(-(-(self.num_prompt_tokens + len(one.times)) // block_size) for one in self.streams)


@asynccontextmanager
async def watched_mesh(*flags: str) -> AsyncGenerator[WatchedMesh]:
    """All streams run when it is entered, and are cut when it is left. A stream that ends before is an
    error."""
    secret, admin_key = secrets.token_hex(16), secrets.token_hex(16)
    own = ("--prefill", "1", "--decode", "2", "--stores", "0", "--threads", "1", "--no-automatic")
    session = ("--session-stickiness-seconds", "1000")
    keys = ("--link-secret", secret, "--admin-key", admin_key)
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-nats-") as folder:
        async with AsyncExitStack() as opened:
            broker = NatsServer(Path(folder))
            opened.push_async_callback(broker.stop)
            await broker.start()
            url = opened.enter_context(
                running_mesh(*own, *session, *keys, *flags, "--nats-server", broker.url)
            )
            bus = await NatsBus.connect(broker.url, name="bench")
            opened.push_async_callback(bus.close)
            client = await opened.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120))
            mesh = WatchedMesh(client, secret, admin_key)
            async with asyncio.TaskGroup() as group:
                tasks = await _begin_streams(mesh, group)
                await _find_home(mesh, bus)
                yield mesh
                for task in tasks:
                    task.cancel()


async def _begin_streams(mesh: WatchedMesh, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
    model = (await mesh.client.get("/v1/models")).json()["data"][0]["id"]
    mesh.streams = [Arrivals() for _ in range(NUM_STREAMS)]
    bodies = [
        {
            "model": model,
            "prompt": PROMPT.format(number=number),
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        for number in range(10, 10 + NUM_STREAMS)
    ]
    once = await mesh.client.post("/v1/completions", json={**bodies[0], "max_tokens": 1})
    mesh.num_prompt_tokens = once.json()["usage"]["prompt_tokens"]
    return [
        group.create_task(_stream(mesh.client, {**body, "stream": True}, stream))
        for body, stream in zip(bodies, mesh.streams, strict=True)
    ]


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], arrivals: Arrivals) -> None:
    headers = {"x-session-id": SESSION}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for chunk in response.aiter_bytes():
            if b"data: {" in chunk:
                arrivals.times.append(time.perf_counter())
    raise RuntimeError(f"a stream ended after {len(arrivals.times)} tokens, while modules moved")


async def _find_home(mesh: WatchedMesh, bus: Bus) -> None:
    """Returns when all streams run on one decode worker, and its frames are heard."""
    async with asyncio.timeout(_START_SECONDS):
        while True:
            services = (await mesh.client.get("/v1/mesh")).json()["services"]
            workers = [one for one in services if (one["kind"], one["state"]) == ("decode_worker", "ready")]
            homes = [one for one in workers if (one["load"] or {}).get("num_running") == NUM_STREAMS]
            if homes and len(workers) > 1 and all(len(one.times) > 1 for one in mesh.streams):
                break
            await asyncio.sleep(_LOOK_SECONDS)
    (mesh.home,) = homes
    (mesh.host,) = (one for one in workers if one is not mesh.home)
    gateway = next(one for one in services if one["kind"] == "gateway")

    def hear(frame: TokenFrame) -> None:
        if frame.worker == mesh.home["incarnation"]:
            mesh.frames.times.append(time.perf_counter())

    await bus.subscribe(TokenFrame, hear, at=gateway["incarnation"])
