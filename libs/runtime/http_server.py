"""An ASGI app served inside this process's event loop: uvicorn without its own signal handlers."""

import asyncio
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class AddressInUse(Exception):
    """The host and port to listen on are taken, or not ours; the text says which."""


class HttpServer:
    """Serves one ASGI app from `open` to `close`."""

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int,
        drain_timeout_seconds: float = 5.0,
        protocol: type[asyncio.Protocol] = HttpToolsProtocol,
        **options: Any,
    ) -> None:
        self._host, self._port = host, port
        config = uvicorn.Config(
            app,
            http=protocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            # Clients keep connections for a minute or so; whoever closes first must not be the server, or a
            # request that is just being sent is lost.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(drain_timeout_seconds)),
            **options,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Listen; returns http://host:port with the real port. Raises AddressInUse."""
        listener = _listen(self._host, self._port)
        host, port = listener.getsockname()[:2]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-server")
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}"

    async def wait_ended(self) -> None:
        """Returns when the server has ended; raises what ended it."""
        if self._serving:
            await asyncio.shield(self._serving)

    async def close(self) -> None:
        """Stop accepting, let responses end within the drain timeout, then cut them. Idempotent."""
        self._server.should_exit = True
        if self._serving:
            await self._serving


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        # The runtime decides what a signal means; uvicorn must not take them from it.
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise AddressInUse(f"cannot listen on {host}:{port}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """asyncio and socket put their own words around it; resolvers have negative numbers."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
