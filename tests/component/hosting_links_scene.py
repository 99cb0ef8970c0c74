"""A host at its Links, with an engine that does what a test says, and homes that come to it."""

import asyncio
from collections.abc import Awaitable, Callable

import torch
from kept_hosting import Kept
from memory_transport import MemoryNetwork, any_transport
from random_model import random_model
from workers_reference import CONFIG

from libs.placement.module import whole_layers
from libs.transport.port import Link, Transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.host.server import HostingServer
from libs.worker.migration.host.weights import form_of
from libs.worker.migration.owner.remote_host import RemoteHost

SECONDS = 5.0


class Scene:
    """One host that serves, and any number of homes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = random_model(CONFIG, seed=7, dtype=dtype)
        self.network, self.hosting = MemoryNetwork(), Kept()
        self.far = any_transport("memory", "host", b"secret", network=self.network)
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
        return any_transport("memory", home, b"secret", network=self.network)

    async def connect(self, home: str = "home") -> Link:
        return await self.near(home).connect(self.server.address, timeout_seconds=SECONDS)

    async def home(self, name: str = "home", *, timeout_seconds: float = SECONDS, **facts: str) -> RemoteHost:
        links = self.call_links(self.near(name), timeout_seconds)
        host = RemoteHost(
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


async def open_one(host: RemoteHost, move_id: str = "m", has_weights: bool = False) -> int:
    return await host.open(
        move_id,
        whole_layers(0, 2),
        num_blocks_wanted=9,
        num_blocks_least=3,
        has_weights=has_weights,
    )
