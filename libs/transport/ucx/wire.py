"""Carries one Link as active messages: small bodies travel along, large ones are fetched into pooled
buffers."""

import hmac
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from libs.transport.credits import Credit
from libs.transport.link import PeerLink
from libs.transport.memory import NO_BODY, Memory, own_copy
from libs.transport.pool import BufferPool
from libs.transport.port import MAX_HEADER_BYTES, LinkLost
from libs.transport.ucx import abi
from libs.transport.ucx.context import UcxContext
from libs.transport.ucx.order import InOrder
from libs.transport.ucx.worker import Arrival
from libs.transport.wire import Sending

EAGER_BYTES = 128 << 10
"""Bodies up to this travel with their header: copies cost less than a second round trip up to here."""

_ENVELOPE = struct.Struct("<QQBQQ")  # token, number, kind, credit
ENVELOPE_BYTES = _ENVELOPE.size + MAX_HEADER_BYTES


class Kind(IntEnum):
    """What a message is. Credit has no place in the order; frames and the close do."""

    FRAME = 0
    CREDIT = 1
    CLOSE = 2


class _Complete(NamedTuple):
    """A frame in memory; None for `frame_header` is the close."""

    frame_header: bytes | None
    memory: Memory
    give_back: Callable[[], None] | None


class UcxWire:
    """See wire.Wire. `token` stands in each message that comes to us; the peer learned it in the
    handshake."""

    def __init__(
        self, context: UcxContext, link: PeerLink, pool: BufferPool[Memory], on_abort: Callable[[], None]
    ) -> None:
        """Raises UcxUnavailable."""
        self._context, self._link, self._pool, self._on_abort = context, link, pool, on_abort
        self._worker = context.make_worker(ENVELOPE_BYTES, self._on_arrival, self._fail)
        self.token, self._peer_token = secrets.randbits(64), 0
        self._next_number = 0
        self._arrived: InOrder[_Complete] = InOrder()
        self._is_over = False

    @property
    def address(self) -> bytes:
        """Where the peer reaches us."""
        return self._worker.address

    def connect(self, address: bytes, peer_token: int) -> None:
        """Reach the peer's worker. Raises LinkLost."""
        self._peer_token = peer_token
        self._worker.connect(address)

    # What the Link asks for

    def post(self, sending: Sending, credit: Credit) -> None:
        """See wire.Wire."""
        envelope = self._envelope(Kind.FRAME, credit, sending.header)
        is_rendezvous = sending.body.num_bytes > EAGER_BYTES or sending.body.is_device
        self._worker.send(envelope, sending.body, is_rendezvous, partial(self._sent, sending))

    def tell(self, credit: Credit) -> None:
        """See wire.Wire."""
        self._send_control(Kind.CREDIT, credit)

    def post_close(self) -> None:
        """See wire.Wire."""
        self._send_control(Kind.CLOSE, Credit(0, 0))

    def abort(self) -> None:
        """See wire.Wire. What is under way still ends in peace, but nobody hears of it."""
        if self._is_over:
            return
        self._is_over = True
        for complete in self._arrived.drain():
            if complete.give_back is not None:
                complete.give_back()
        self._context.retire(self._worker)
        self._on_abort()

    def _fail(self, reason: str) -> None:
        self._link.lose(LinkLost(f"UCX lost {self._link.peer}: {reason}"))

    def _envelope(self, kind: Kind, credit: Credit, header: bytes) -> bytes:
        number = self._next_number
        if kind is not Kind.CREDIT:
            self._next_number += 1
        return _ENVELOPE.pack(self._peer_token, number, kind, *credit) + header

    def _send_control(self, kind: Kind, credit: Credit) -> None:
        self._worker.send(self._envelope(kind, credit, b""), NO_BODY, False, self._check)

    def _sent(self, sending: Sending, status: int) -> None:
        self._check(status)
        if status == abi.OK:
            self._link.on_sent(sending)

    def _check(self, status: int) -> None:
        if status != abi.OK and not self._is_over:
            self._fail(self._worker.status_text(status))

    # What comes from the peer

    def _on_arrival(self, arrival: Arrival) -> None:
        if self._is_over or not self._is_for_us(arrival.envelope):
            self._discard(arrival)
            return
        _, number, kind, *credit = _ENVELOPE.unpack_from(arrival.envelope)
        if kind == Kind.CREDIT:
            self._link.on_credit(Credit(*credit))
        elif kind == Kind.CLOSE:
            self._complete(number, _Complete(None, NO_BODY, None))
        elif self._link.on_arriving(arrival.num_bytes):
            self._link.on_credit(Credit(*credit))
            self._take(number, arrival)
        else:
            self._discard(arrival)

    def _is_for_us(self, envelope: bytes) -> bool:
        token = self.token.to_bytes(8, "little")
        return _ENVELOPE.size <= len(envelope) <= ENVELOPE_BYTES and hmac.compare_digest(envelope[:8], token)

    def _discard(self, arrival: Arrival) -> None:
        if arrival.descriptor:
            self._worker.discard(arrival.descriptor)

    def _take(self, number: int, arrival: Arrival) -> None:
        header = arrival.envelope[_ENVELOPE.size :]
        if arrival.descriptor:
            buffer = self._pool.take(arrival.num_bytes)
            memory = Memory(buffer.address, arrival.num_bytes, buffer.owner, buffer.is_device)
            complete = _Complete(header, memory, partial(self._pool.give, buffer))
            done = partial(self._fetched, number, complete)
            self._worker.fetch(arrival.descriptor, buffer, arrival.num_bytes, done)
        else:
            self._complete(number, _Complete(header, own_copy(arrival.body), None))

    def _fetched(self, number: int, complete: _Complete, status: int) -> None:
        if status == abi.OK and not self._is_over:
            self._complete(number, complete)
            return
        if complete.give_back is not None:
            complete.give_back()
        self._check(status)

    def _complete(self, number: int, complete: _Complete) -> None:
        try:
            due = self._arrived.place(number, complete)
        except ValueError as error:
            self._link.lose(LinkLost(f"{self._link.peer} broke the protocol: {error}"))
            return
        for header, memory, give_back in due:
            if header is None:
                self._link.on_close()
            else:
                self._link.on_frame(header, memory, give_back)
