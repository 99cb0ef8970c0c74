"""Carries one Link within a host: headers and small bodies as packets, large bodies in shared segments that
the receiver reads in place until it releases them."""

import asyncio
import ctypes
import struct
from collections import deque
from enum import IntEnum

from libs.transport.credits import Credit
from libs.transport.link import PeerLink
from libs.transport.memory import as_memory, copy_to_host, own_copy
from libs.transport.packets import PacketSocket
from libs.transport.port import MAX_HEADER_BYTES, LinkLost
from libs.transport.shm_segments import OwnSegments, PeerSegments, Segment
from libs.transport.wire import Sending

INLINE_BYTES = 32 << 10
COPY_BYTES = 8 << 20
"""How much is copied before the event loop gets a turn."""

_PACKET = struct.Struct("<BQQIQQ")  # kind, credit, segment id, segment bytes when it is new, body bytes


class Kind(IntEnum):
    """What a packet is."""

    INLINE = 0
    SEGMENT = 1
    CREDIT = 2
    RELEASED = 3
    FORGET = 4
    CLOSE = 5


class _Job:
    """A frame that waits for its packet; `num_copied` of its body lie in `segment`."""

    __slots__ = ("credit", "num_copied", "segment", "sending")

    def __init__(self, sending: Sending, credit: Credit) -> None:
        self.sending, self.credit = sending, credit
        self.segment: Segment | None = None
        self.num_copied = 0


class ShmWire:
    """See wire.Wire."""

    def __init__(self, link: PeerLink, packets: PacketSocket, cap_bytes: int) -> None:
        self._link, self._packets = link, packets
        self._own = OwnSegments(cap_bytes, lambda segment_id: self._send(Kind.FORGET, segment_id=segment_id))
        self._peers = PeerSegments()
        self._jobs: deque[_Job] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    def post(self, sending: Sending, credit: Credit) -> None:
        """See wire.Wire."""
        self._jobs.append(_Job(sending, credit))
        if len(self._jobs) == 1:
            self._work()

    def tell(self, credit: Credit) -> None:
        """See wire.Wire."""
        self._send(Kind.CREDIT, credit)

    def post_close(self) -> None:
        """See wire.Wire."""
        self._send(Kind.CLOSE)

    def abort(self) -> None:
        """See wire.Wire."""
        self._is_over = True
        self._jobs.clear()
        self._packets.close()
        self._own.close()
        self._peers.close()

    # Sending

    def _work(self) -> None:
        budget_bytes = COPY_BYTES
        while self._jobs and budget_bytes > 0:
            job = self._jobs[0]
            body = job.sending.body
            if body.num_bytes <= INLINE_BYTES and not body.is_device:
                content = ctypes.string_at(body.address, body.num_bytes) if body.num_bytes else b""
                self._send(
                    Kind.INLINE, job.credit, body_bytes=body.num_bytes, tail=job.sending.header + content
                )
            else:
                budget_bytes -= self._copy(job, budget_bytes)
                if job.num_copied < body.num_bytes:
                    break
                self._send_segment(job)
            if self._is_over:
                return
            self._jobs.popleft()
            self._link.on_sent(job.sending)
        if self._jobs:
            self._loop.call_soon(self._work)

    def _copy(self, job: _Job, budget_bytes: int) -> int:
        body = job.sending.body
        if job.segment is None:
            job.segment = self._own.lend(body.num_bytes)
        first, last = job.num_copied, min(job.num_copied + budget_bytes, body.num_bytes)
        copy_to_host(body, job.segment.array[first:last], first_byte=first)
        job.num_copied = last
        return last - first

    def _send_segment(self, job: _Job) -> None:
        segment = job.segment
        if segment is None:
            return
        is_new = segment.descriptor >= 0
        self._send(
            Kind.SEGMENT,
            job.credit,
            segment_id=segment.segment_id,
            segment_bytes=segment.num_bytes if is_new else 0,
            body_bytes=job.sending.body.num_bytes,
            tail=job.sending.header,
            descriptor=segment.pass_descriptor(),
        )

    def _send(
        self,
        kind: Kind,
        credit: Credit = Credit(0, 0),  # noqa: B008  # immutable
        *,
        segment_id: int = 0,
        segment_bytes: int = 0,
        body_bytes: int = 0,
        tail: bytes = b"",
        descriptor: int = -1,
    ) -> None:
        packet = _PACKET.pack(kind, *credit, segment_id, segment_bytes, body_bytes) + tail
        self._packets.send(packet, descriptor)

    # What comes from the peer

    def on_packet(self, packet: bytes, descriptor: int) -> None:
        """Take one packet (packets.OnPacket)."""
        try:
            self._take(packet, descriptor)
        except (LinkLost, struct.error, ValueError) as error:
            self._link.lose(LinkLost(f"{self._link.peer} broke the protocol: {error}"))

    def _take(self, packet: bytes, descriptor: int) -> None:
        kind, num_frames, num_bytes, segment_id, segment_bytes, body_bytes = _PACKET.unpack_from(packet)
        if descriptor >= 0:
            self._peers.add(segment_id, segment_bytes, descriptor)
        kind, tail = Kind(kind), packet[_PACKET.size :]
        if kind in (Kind.INLINE, Kind.SEGMENT, Kind.CREDIT):
            self._link.on_credit(Credit(num_frames, num_bytes))
        if kind is Kind.INLINE:
            self._take_inline(tail, body_bytes)
        elif kind is Kind.SEGMENT:
            self._take_segment(tail, segment_id, body_bytes)
        elif kind is Kind.RELEASED:
            self._own.take_back(segment_id)
        elif kind is Kind.FORGET:
            self._peers.forget(segment_id)
        elif kind is Kind.CLOSE:
            self._link.on_close()

    def _take_inline(self, tail: bytes, body_bytes: int) -> None:
        num_header_bytes = len(tail) - body_bytes
        if not 0 <= num_header_bytes <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {num_header_bytes} bytes")
        if self._link.on_arriving(body_bytes):
            body = own_copy(tail[num_header_bytes:])
            self._link.on_frame(tail[:num_header_bytes], body, None)

    def _take_segment(self, header: bytes, segment_id: int, body_bytes: int) -> None:
        body = as_memory(self._peers.body(segment_id, body_bytes))
        if self._link.on_arriving(body_bytes):
            self._link.on_frame(header, body, lambda: self._give_back(segment_id))

    def _give_back(self, segment_id: int) -> None:
        if not self._is_over:
            self._send(Kind.RELEASED, segment_id=segment_id)
