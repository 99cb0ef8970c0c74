"""HTTP inside the event loop: real sockets, on loopback."""

import asyncio
import signal
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from libs.runtime.http_server import AddressInUse, HttpServer
from services.up.announce import wait_gateway_ready


class App:
    """Answers /ready after a few refusals, and /slow when it is let."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.num_refusals = num_refusals
        self.slow_begun, self.may_answer = asyncio.Event(), asyncio.Event()
        self.asgi = Starlette(routes=[Route("/ready", self.ready), Route("/slow", self.slow)])

    async def ready(self, _request: Request) -> Response:
        self.num_refusals -= 1
        return PlainTextResponse("", status_code=503 if self.num_refusals >= 0 else 200)

    async def slow(self, _request: Request) -> Response:
        self.slow_begun.set()
        await self.may_answer.wait()
        return PlainTextResponse("at last")


def server(app: App, *, port: int = 0, drain_timeout_seconds: float = 5.0) -> HttpServer:
    return HttpServer(app.asgi, host="127.0.0.1", port=port, drain_timeout_seconds=drain_timeout_seconds)


async def test_it_serves_from_open_to_close_and_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    serving = server(App())
    url = await serving.open()
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(url + "/ready")).status_code == 200
        assert signal.getsignal(signal.SIGTERM) is before
        await serving.close()
        with pytest.raises(httpx.ConnectError):
            await client.get(url + "/ready")
    await serving.close()


async def test_a_taken_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}: Address already in use"):
            await server(App(), port=port).open()


async def test_a_response_in_progress_ends_before_it_closes() -> None:
    app = App()
    serving = server(app)
    url = await serving.open()
    async with httpx.AsyncClient(trust_env=False) as client:
        asking = asyncio.create_task(client.get(url + "/slow"))
        await app.slow_begun.wait()
        closing = asyncio.create_task(serving.close())
        await asyncio.sleep(0)
        app.may_answer.set()
        assert (await asking).text == "at last"
        await closing


async def test_closing_what_was_never_opened_is_fine() -> None:
    await server(App()).close()


async def test_the_gateway_is_asked_until_it_is_ready() -> None:
    serving = server(App(num_refusals=2))
    url = await serving.open()
    assert await wait_gateway_ready(url)
    await serving.close()
