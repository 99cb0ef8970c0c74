"""Reusable buffers by size class. First touch of fresh pages costs 5-100 times a reuse, so buffers are
faulted in when made and kept when given back, up to a cap on what lies idle (and on all together when one is
made)."""

import mmap
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from libs.transport.memory import Memory, as_memory

SMALLEST_CLASS_BYTES = 64 << 10
HUGE_PAGE_BYTES = 2 << 20
FAULT_IN_BYTES = 64 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels refuse it, then numpy touches the pages


class Sized(Protocol):
    """What a pool holds."""

    @property
    def num_bytes(self) -> int:
        """Size of the buffer, a size class."""
        ...


B = TypeVar("B", bound=Sized)


def size_class_bytes(num_bytes: int) -> int:
    """The smallest class that holds `num_bytes`. Four classes to a doubling: at most a quarter is left
    unused."""
    if num_bytes <= SMALLEST_CLASS_BYTES:
        return SMALLEST_CLASS_BYTES
    step = 1 << max((num_bytes - 1).bit_length() - 3, 0)
    return -(-num_bytes // step) * step


def fault_in(pages: mmap.mmap) -> None:
    """Give every page its memory now, unless that would hold up the event loop for long."""
    if len(pages) > FAULT_IN_BYTES:
        return
    try:
        pages.madvise(MADV_POPULATE_WRITE)
    except OSError:
        np.frombuffer(pages, dtype=np.uint8)[:: mmap.PAGESIZE] = 0


def allocate_host(num_bytes: int) -> Memory:
    """Fresh host memory, faulted in, in huge pages where the kernel gives them. Freed with its last view."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    fault_in(pages)
    return as_memory(np.frombuffer(pages, dtype=np.uint8))


class BufferPool(Generic[B]):
    """`take` a buffer, `give` it back. `allocate` makes one, `dismiss` hears of each that is not kept."""

    def __init__(
        self, idle_cap_bytes: int, allocate: Callable[[int], B], dismiss: Callable[[B], None] | None = None
    ) -> None:
        self._cap_bytes, self._allocate, self._dismiss = idle_cap_bytes, allocate, dismiss
        self._idle: OrderedDict[int, list[B]] = OrderedDict()  # by class, least recently used class first
        self.idle_bytes = 0
        self.taken_bytes = 0

    def take(self, num_bytes: int) -> B:
        """A buffer of at least `num_bytes`; its content is whatever it was."""
        class_bytes = size_class_bytes(num_bytes)
        self.taken_bytes += class_bytes
        idle = self._idle.get(class_bytes)
        if not idle:
            self.shrink(max(self._cap_bytes - self.taken_bytes, 0))
            return self._allocate(class_bytes)
        self._idle.move_to_end(class_bytes)
        self.idle_bytes -= class_bytes
        return idle.pop()

    def give(self, buffer: B) -> None:
        """Take back a buffer; drops the least recently used ones beyond the cap."""
        self.taken_bytes -= buffer.num_bytes
        self._idle.setdefault(buffer.num_bytes, []).append(buffer)
        self._idle.move_to_end(buffer.num_bytes)
        self.idle_bytes += buffer.num_bytes
        self.shrink(self._cap_bytes)

    def shrink(self, idle_bytes: int) -> None:
        """Drop idle buffers until at most `idle_bytes` remain."""
        while self.idle_bytes > idle_bytes:
            class_bytes = next(iter(self._idle))
            if not self._idle[class_bytes]:
                del self._idle[class_bytes]
                continue
            buffer = self._idle[class_bytes].pop()
            self.idle_bytes -= class_bytes
            if self._dismiss is not None:
                self._dismiss(buffer)

    def close(self) -> None:
        """Drop all that is idle without a word to `dismiss`; what is taken is freed by those who hold it."""
        self._idle.clear()
        self.idle_bytes = 0
