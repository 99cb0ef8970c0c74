"""Shared memory without names: memfds, sealed in size, their descriptors passed over the Link's socket. The
kernel frees one when neither side maps it any more, so no death leaves anything behind."""

import fcntl
import mmap
import os
from collections.abc import Callable
from itertools import count

import numpy as np

from libs.transport.memory import Bytes
from libs.transport.pool import BufferPool, fault_in
from libs.transport.port import LinkLost

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """The sender's mapping. `descriptor` is -1 once it was passed to the peer."""

    def __init__(self, segment_id: int, num_bytes: int) -> None:
        self.segment_id, self.num_bytes = segment_id, num_bytes
        self.descriptor = os.memfd_create("kvmesh", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            pages = mmap.mmap(self.descriptor, num_bytes)
        except BaseException:
            self.close()
            raise
        fault_in(pages)
        self.array: Bytes = np.frombuffer(pages, dtype=np.uint8)

    def pass_descriptor(self) -> int:
        """The descriptor, once; the caller owns it then."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """Close the descriptor if the peer never got it; the mapping goes with its last view."""
        if self.descriptor >= 0:
            os.close(self.pass_descriptor())


class OwnSegments:
    """The segments that one side sends with: taken, on their way, given back by the peer's release."""

    def __init__(self, cap_bytes: int, on_dismiss: Callable[[int], None]) -> None:
        self._ids = count()
        self._lent: dict[int, Segment] = {}
        self._on_dismiss = on_dismiss
        self.pool: BufferPool[Segment] = BufferPool(
            cap_bytes, lambda num_bytes: Segment(next(self._ids), num_bytes), self._dismiss
        )

    def _dismiss(self, segment: Segment) -> None:
        segment.close()
        self._on_dismiss(segment.segment_id)

    def lend(self, num_bytes: int) -> Segment:
        """A segment to fill and send."""
        segment = self.pool.take(num_bytes)
        self._lent[segment.segment_id] = segment
        return segment

    def take_back(self, segment_id: int) -> None:
        """The peer released it. Raises LinkLost when it never had it."""
        segment = self._lent.pop(segment_id, None)
        if segment is None:
            raise LinkLost(f"the peer released segment {segment_id}, which it does not have")
        self.pool.give(segment)

    def close(self) -> None:
        """Let go of all."""
        for segment in self._lent.values():
            segment.close()
        self._lent.clear()
        self.pool.close()


class PeerSegments:
    """The peer's segments as mapped here."""

    def __init__(self) -> None:
        self._arrays: dict[int, Bytes] = {}

    def add(self, segment_id: int, num_bytes: int, descriptor: int) -> None:
        """Map a segment that came for the first time; closes the descriptor. Raises LinkLost."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != num_bytes:
                raise LinkLost("the peer sent a segment that is not sealed in its size")
            pages = mmap.mmap(descriptor, num_bytes)
        except (OSError, ValueError) as error:
            raise LinkLost(f"the peer sent a segment that cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        fault_in(pages)
        self._arrays[segment_id] = np.frombuffer(pages, dtype=np.uint8)

    def body(self, segment_id: int, num_bytes: int) -> Bytes:
        """The first bytes of a segment. Raises LinkLost."""
        array = self._arrays.get(segment_id)
        if array is None or num_bytes > array.nbytes:
            raise LinkLost(
                f"the peer speaks of {num_bytes} bytes in segment {segment_id}, which it never sent"
            )
        return array[:num_bytes]

    def forget(self, segment_id: int) -> None:
        """The peer uses it no more; the mapping goes with its last view."""
        self._arrays.pop(segment_id, None)

    def close(self) -> None:
        """Forget all."""
        self._arrays.clear()
