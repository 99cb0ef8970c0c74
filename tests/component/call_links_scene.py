"""Engines whose calls to each other travel on Links that their threads turn."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from libs.engine.engine import Engine
from libs.transport.choose import TransportKind, make_transport
from libs.worker.migration.call_links import CallLinks

SECONDS = 10.0


@asynccontextmanager
async def call_links(
    kind: TransportKind, name: str, engine: Engine | None = None
) -> AsyncGenerator[CallLinks]:
    """On the loop of an engine, which hosts; without one on the running loop."""
    transport = None if engine is not None else make_transport(kind, name, b"secret")
    links = CallLinks(
        engine.own_loop if engine is not None else None,
        lambda: transport or make_transport(kind, name, b"secret"),
        wake=engine.wake if engine is not None else lambda: None,
        timeout_seconds=SECONDS,
        on_call_done=lambda seconds: None,
        on_hosted_call_done=lambda seconds: None,
    )
    accepting: asyncio.Future[None] | None = None
    if engine is not None:
        await links.listen("127.0.0.1")
        accepting = asyncio.ensure_future(links.accept(engine.hosting))
    try:
        yield links
    finally:
        if accepting is not None:
            accepting.cancel()
            await asyncio.wait({accepting})
        await links.close()
        if transport is not None:
            await transport.close()
