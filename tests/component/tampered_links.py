"""Links whose sender shows every frame to a test first."""

from collections.abc import Awaitable, Callable
from typing import Any

from libs.transport.frames import FrameHeader, decode_header
from libs.transport.port import Bytes, Link, Listener, Transport

Tamper = Callable[[FrameHeader, Bytes | None], bool | Awaitable[object]]
"""May change the body; False swallows the frame; something to await holds it back."""


class TamperedLink:
    """Shows every frame to `tamper` before it is sent."""

    def __init__(self, link: Link, tamper: Tamper) -> None:
        self._link, self._tamper = link, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    async def send(self, header: bytes, body: Bytes | None = None, *, timeout_seconds: float) -> None:
        body = None if body is None else body.copy()
        verdict = self._tamper(decode_header(header), body)
        if not isinstance(verdict, bool):
            await verdict
        if verdict:
            await self._link.send(header, body, timeout_seconds=timeout_seconds)


class TamperedListener:
    """Its Links are tampered with."""

    def __init__(self, listener: Listener, tamper: Tamper) -> None:
        self._listener, self._tamper = listener, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    async def accept(self) -> TamperedLink:
        return TamperedLink(await self._listener.accept(), self._tamper)


class TamperedTransport:
    """Tampers with the frames that this process sends."""

    def __init__(self, transport: Transport, tamper: Tamper) -> None:
        self._transport, self._tamper = transport, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def listen(self, host: str, port: int = 0) -> TamperedListener:
        return TamperedListener(await self._transport.listen(host, port), self._tamper)

    async def connect(self, address: str, *, expected_peer: str = "", timeout_seconds: float) -> TamperedLink:
        link = await self._transport.connect(
            address, expected_peer=expected_peer, timeout_seconds=timeout_seconds
        )
        return TamperedLink(link, self._tamper)


def tampering(tamper: Tamper) -> Callable[[Transport], Transport]:
    return lambda transport: TamperedTransport(transport, tamper)  # type: ignore[return-value]  # by __getattr__
