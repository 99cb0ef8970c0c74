"""Runs the handshake over a line, from both sides, and accepts for a listener: what waits is
bounded in number and time, whoever knocks."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import NamedTuple, Protocol

import structlog

from libs.transport import handshake
from libs.transport.handshake import Identity, Side
from libs.transport.link import PeerLink
from libs.transport.port import HandshakeRefused, LinkError, LinkLost

HANDSHAKE_SECONDS = 3.0
MAX_HANDSHAKES = 64
MAX_UNACCEPTED_LINKS = 128

_log = structlog.get_logger(__name__)


class Line(Protocol):
    """Carries the packets of a handshake."""

    def send(self, packet: bytes) -> None:
        """Send one packet; never blocks."""
        ...

    async def receive(self) -> bytes:
        """The next packet. Raises LinkLost when the peer hangs up, HandshakeRefused for what is no packet."""
        ...

    def close(self) -> None:
        """Hang up, after what was sent. Idempotent."""
        ...


class Prepared(NamedTuple):
    """A Link with a proven peer, not yet joined to it."""

    link: PeerLink
    offer: bytes
    join: Callable[[bytes], None]
    """Takes the peer's offer. Raises LinkLost."""


Prepare = Callable[[Side], Prepared]


async def connect_line(me: Identity, line: Line, expected_peer: str, prepare: Prepare) -> PeerLink:
    """The client's side. Raises HandshakeRefused, LinkLost; then the line is closed."""
    prepared: Prepared | None = None
    try:
        hello = handshake.client_hello(me)
        line.send(hello)
        side = handshake.check_answer(me, hello, await line.receive(), expected_peer)
        prepared = prepare(side)
        side, proof = handshake.prove(me, side, prepared.offer)
        line.send(proof)
        prepared.join(handshake.check_welcome(me, side, await line.receive()))
    except BaseException as error:
        _hang_up(line, prepared, error)
        raise
    return prepared.link


async def _answer(me: Identity, line: Line, acceptor: "Acceptor", prepare: Prepare) -> None:
    prepared: Prepared | None = None
    try:
        side, answer = handshake.answer_hello(me, await line.receive())
        line.send(answer)
        side, offer = handshake.check_proof(me, side, await line.receive())
        if not acceptor.has_room():
            raise HandshakeRefused("too many Links wait to be accepted")
        prepared = prepare(side)
        prepared.join(offer)
        line.send(handshake.welcome(me, side, prepared.offer))
        acceptor.offer(prepared.link)
    except BaseException as error:
        _hang_up(line, prepared, error)
        raise


def _hang_up(line: Line, prepared: Prepared | None, error: BaseException) -> None:
    if isinstance(error, HandshakeRefused):
        line.send(handshake.refusal(str(error)))
    if prepared is not None:
        prepared.link.lose(LinkLost(f"the handshake failed: {error}"))
    line.close()


class Acceptor:
    """Handshakes under way and Links that nobody accepted yet."""

    def __init__(self) -> None:
        self._handshakes: set[asyncio.Task[None]] = set()
        self._links: deque[PeerLink] = deque()
        self._change = asyncio.Event()
        self._is_closed = False
        self.num_refused = 0

    def has_room(self) -> bool:
        """Whether one more Link could be offered."""
        return not self._is_closed and len(self._links) < MAX_UNACCEPTED_LINKS

    def shake_hands(self, me: Identity, line: Line, prepare: Prepare) -> None:
        """Somebody connected: shake hands beside everything else, or hang up at once."""
        if self.has_room() and len(self._handshakes) < MAX_HANDSHAKES:
            task = asyncio.get_running_loop().create_task(self._run(_answer(me, line, self, prepare)))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
        else:
            self.refuse("too many handshakes at once, or too many Links wait to be accepted")
            line.close()

    async def _run(self, handshaking: Coroutine[None, None, None]) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await handshaking
        except LinkError as error:
            self.refuse(str(error))
        except TimeoutError:
            self.refuse(f"no handshake within {HANDSHAKE_SECONDS} s")
        except Exception:  # noqa: BLE001  # the outermost boundary of this task: one bad peer ends nobody else
            _log.exception("handshake_failed")

    def refuse(self, reason: str) -> None:
        """Count a refusal. Logged at 1, 2, 4, 8..., so that a flood of strangers cannot fill the log."""
        self.num_refused += 1
        if self.num_refused & (self.num_refused - 1) == 0:
            _log.warning("handshake_refused", reason=reason, num_refused=self.num_refused)

    def offer(self, link: PeerLink) -> None:
        """Put a Link in line for `accept`."""
        self._links.append(link)
        self._change.set()

    async def accept(self) -> PeerLink:
        """The next Link that still stands. Raises LinkLost once closed."""
        while True:
            while self._links:
                link = self._links.popleft()
                if link.is_open:
                    return link
            if self._is_closed:
                raise LinkLost("this listener is closed")
            self._change.clear()
            await self._change.wait()

    async def close(self) -> None:
        """Cut the handshakes, close the Links that nobody took, end all `accept`. Idempotent."""
        self._is_closed = True
        tasks = tuple(self._handshakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._change.set()
        while self._links:
            await self._links.popleft().close()
