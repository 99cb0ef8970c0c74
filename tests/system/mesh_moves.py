"""Moves of modules on the real mesh: ordered over HTTP by hand, and load that goes on meanwhile."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from black_box import Mesh
from libs.bus.nats_bus import NatsBus

MOVE_TIMEOUT_SECONDS = 150.0
HOME_TIMEOUT_SECONDS = 40.0
REFUSED_SECONDS = 0.2
"""Who was refused asks again after so long."""


class Moves:
    """What the holder of the admin key may ask of a mesh. Made by `moves_of`."""

    def __init__(self, mesh: Mesh, client: httpx.AsyncClient) -> None:
        self.mesh, self._client = mesh, client
        self.patience_seconds = 0.0
        """A coordinator that has just begun to lead may not have heard of everybody yet."""

    async def order(self, instance: str, **asked: Any) -> httpx.Response:
        """POST a move; whatever comes back."""
        return await self._client.post("/v1/mesh/migrations", json={"instance": instance, **asked})

    async def begin(self, instance: str, **asked: Any) -> str:
        """Order a move that must be accepted within `patience_seconds`; returns its id."""
        deadline = time.monotonic() + self.patience_seconds
        while (response := await self.order(instance, **asked)).status_code != 202:
            assert time.monotonic() < deadline, response.text
            await asyncio.sleep(0.1)
        return str(response.json()["id"])

    async def cancel(self, move_id: str) -> httpx.Response:
        return await self._client.delete(f"/v1/mesh/migrations/{move_id}")

    async def record(self, move_id: str) -> dict[str, Any]:
        response = await self._client.get(f"/v1/mesh/migrations/{move_id}")
        return dict(response.json()) if response.status_code == 200 else {}

    async def all(self) -> list[dict[str, Any]]:
        return list((await self._client.get("/v1/mesh/migrations")).json()["data"])

    async def wait_over(self, move_id: str) -> dict[str, Any]:
        """The record of a move once it is over, however it ended."""
        record: dict[str, Any] = {}
        async with asyncio.timeout(MOVE_TIMEOUT_SECONDS):
            while not record.get("is_over"):
                await asyncio.sleep(0.02)
                record = await self.record(move_id)
        return record

    async def done(self, instance: str, **asked: Any) -> dict[str, Any]:
        """Order a move and see it done."""
        record = await self.wait_over(await self.begin(instance, **asked))
        assert record["phase"] == "done", record
        return record

    async def away_and_back(self, instance: str, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        away = await self.done(instance, **asked)
        return away, await self.done(instance, return_of=away["id"])

    async def bring_home(self) -> None:
        """Everything that is away."""
        for name, told in (await self.placement()).items():
            for move_id in away_of(told):
                await self.done(name, return_of=move_id)

    async def placement(self) -> dict[str, dict[str, Any]]:
        """Instances by the names of their workers."""
        told = (await self._client.get("/v1/mesh/placement")).json()["instances"]
        return {instance["name"]: instance for instance in told}

    async def epoch(self, instance: str) -> int:
        return int((await self.placement())[instance]["epoch"])

    async def is_led(self) -> bool:
        """Whether a coordinator leads."""
        return (await self._client.get("/v1/mesh/explain")).status_code == 200

    async def wait_settled(self) -> None:
        """Until nothing is under way, and hosts and homes tell the same."""

        async def unsettled() -> list[object]:
            under_way = [move["id"] for move in await self.all() if not move["is_over"]]
            return [*under_way, *inconsistencies(await self.placement())]

        await until_none(unsettled, HOME_TIMEOUT_SECONDS)

    async def wait_all_home(self, timeout_seconds: float = HOME_TIMEOUT_SECONDS) -> None:
        """Until everything is where it belongs, nobody hosts anything, and nothing is under way."""
        await until_none(self._not_home, timeout_seconds)

    async def _not_home(self) -> list[object]:
        placement = await self.placement()
        away = [f"{name}: {what}" for name, told in placement.items() for what in away_of(told)]
        hosted = [f"{name} hosts {one['what']}" for name, told in placement.items() for one in told["hosted"]]
        hosts = [name for name, told in placement.items() if told["capacity"]["num_hosted_bytes"]]
        return [*away, *hosted, *hosts, *(move["id"] for move in await self.all() if not move["is_over"])]


async def until_none(troubles: Callable[[], Awaitable[list[object]]], timeout_seconds: float) -> None:
    """Ask again and again until nothing is wrong; fail with what is at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while found := await troubles():
        if time.monotonic() > deadline:
            raise AssertionError(f"still after {timeout_seconds} s: {found}")
        await asyncio.sleep(0.05)


def away_of(told: dict[str, Any]) -> list[str]:
    """The moves whose modules an instance has elsewhere."""
    return [one["move_id"] for one in _modules_away(told)]


def inconsistencies(placement: dict[str, dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Host, home and move of what an instance has away and its host does not hold, or the other way round."""
    hosted = {
        (told["incarnation"], one["instance_incarnation"], one["move_id"])
        for told in placement.values()
        for one in told["hosted"]
    }
    away = {
        (one["incarnation"], told["incarnation"], one["move_id"])
        for told in placement.values()
        for one in _modules_away(told)
    }
    return hosted ^ away


def _modules_away(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(run for run in told["layers"] if "move_id" in run), *told["heads"], *told["lent"]]


@asynccontextmanager
async def bus_of(mesh: Mesh) -> AsyncIterator[NatsBus]:
    """The mesh's own bus, to hear at once what a poll would miss."""
    found = re.search(r"ready at (nats://\S+)", mesh.output.read_text())
    assert found
    bus = await NatsBus.connect(found[1])
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def moves_of(mesh: Mesh) -> AsyncIterator[Moves]:
    headers = {"authorization": f"Bearer {(mesh.state_dir / 'admin.key').read_text().strip()}"}
    async with httpx.AsyncClient(base_url=mesh.url, headers=headers, timeout=30, trust_env=False) as client:
        yield Moves(mesh, client)


@dataclass
class Load:
    """Streams that follow each other without a pause until `is_over`, each compared with what it must say.

    One that is not right must have ended in an error that says so.
    """

    client: openai.AsyncOpenAI
    model: str
    prompts: Sequence[str]
    expected: Sequence[str]
    max_tokens: int
    is_cold: bool = False
    """No prompt finds the KV of one before it."""
    session: str = ""
    is_over: bool = False
    num_asked: int = 0
    num_right: int = 0
    refused: list[str] = field(default_factory=list[str])
    """Requests that never became a stream."""
    errors: list[str] = field(default_factory=list[str])
    """Streams that ended in an error."""
    has_tokens: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, first: int, stride: int) -> None:
        """Prompts `first`, `first + stride`, ... round and round."""
        i = first
        while not self.is_over:
            try:
                text = await self._stream(self.prompts[i])
            except openai.APIStatusError as error:
                self.refused.append(str(error))
                await asyncio.sleep(REFUSED_SECONDS)
            except openai.APIError as error:
                self.errors.append(str(error))
            else:
                assert text == self.expected[i], f"prompt {i}: {text!r} is not {self.expected[i]!r}"
                self.num_right += 1
                self.has_ended.set()
            i = (i + stride) % len(self.prompts)

    async def next_right(self, num_streams: int = 1) -> None:
        """Until so many more streams have ended as they should."""
        until_right = self.num_right + num_streams
        async with asyncio.timeout(MOVE_TIMEOUT_SECONDS):
            while self.num_right < until_right:
                self.has_ended.clear()
                await self.has_ended.wait()

    async def _stream(self, prompt: str) -> str:
        text = ""
        self.num_asked += 1
        extra: dict[str, Any] = {"ignore_eos": True}
        if self.session:
            extra["session_id"] = self.session
        if self.is_cold:
            extra["cache_salt"] = f"prompt {self.num_asked}"
        stream = await self.client.completions.create(
            model=self.model,
            prompt=prompt,
            temperature=0,
            max_tokens=self.max_tokens,
            stream=True,
            extra_body=extra,
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            self.has_tokens.set()
        return text


@asynccontextmanager
async def load_on(
    mesh: Mesh,
    prompts: Sequence[str],
    expected: Sequence[str],
    max_tokens: int,
    num_streams: int,
    *,
    is_cold: bool = False,
    session: str = "",
) -> AsyncIterator[Load]:
    """`num_streams` at once; those that are under way at the end of the block go on to their own end."""
    client = mesh.async_client()
    load = Load(client, mesh.model, prompts, expected, max_tokens, is_cold, session)
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(num_streams):
                group.create_task(load.run(i, num_streams))
            try:
                async with asyncio.timeout(MOVE_TIMEOUT_SECONDS):
                    await load.has_tokens.wait()
                yield load
            finally:
                load.is_over = True
    finally:
        await client.close()
