"""The bytes that a pool lies in: its owner's from the front, regions given to others from the end.

On the CPU it is address space, more than may be used, whose pages are taken when they are touched: so it can
grow, and what is given back is free for other uses of the machine. On other devices it is one allocation.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass

import structlog
import torch

from libs.engine.errors import NoRoom

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: takes pages without changing what is in them
_MAP_NORESERVE = 0x4000  # Linux; the standard library does not name it yet
_SPARE_SPACE = 8  # address space per byte: regions find a hole, however they come and go
_TOUCH_BYTES = 16 << 20  # at once: other threads may take pages in between
_PAGE_BYTES = mmap.PAGESIZE
_DEVICE_ALIGNMENT_BYTES = 256

_libc = ctypes.CDLL(None, use_errno=True)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Region:
    """Bytes that the owner gave up. `memory` is uint8 `[num_bytes]`, void once the region was taken back."""

    first_byte: int
    num_bytes: int
    memory: torch.Tensor

    @property
    def end_byte(self) -> int:
        """Behind the last one."""
        return self.first_byte + self.num_bytes


class Arena:
    """`num_bytes` may be used, by the owner and in regions together. Not thread-safe, but for `touch`."""

    def __init__(self, num_bytes: int, device: torch.device, *, max_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._max_bytes = max(num_bytes, max_bytes)
        self._regions: list[Region] = []
        self._map: mmap.mmap | None = None
        if device.type == "cpu":
            self._map = _reserve(self._max_bytes)
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
            self._alignment_bytes = _PAGE_BYTES
            if not self.touch(0, num_bytes):
                self.memory[:num_bytes].zero_()  # a page's first touch is slow: pay it here, not in a step
        else:
            self._max_bytes = num_bytes
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._alignment_bytes = _DEVICE_ALIGNMENT_BYTES

    @property
    def num_given_up_bytes(self) -> int:
        """In regions."""
        return sum(region.num_bytes for region in self._regions)

    @property
    def own_bytes(self) -> int:
        """That the owner may use, from the front."""
        return min(self._own_end_byte, self.num_bytes - self.num_given_up_bytes)

    @property
    def _own_end_byte(self) -> int:
        """Where the first region begins, or the memory that may be used ends."""
        return min([self.num_bytes, *(region.first_byte for region in self._regions)])

    def own_bytes_after(self, num_bytes: int) -> int:
        """`own_bytes` once a region of `num_bytes` was given up; below 0 where there is no such room."""
        left = self.num_bytes - self.num_given_up_bytes - num_bytes
        return min(self.own_bytes, left, self._place(num_bytes))

    def give_up(self, num_bytes: int, used_bytes: int) -> Region:
        """A region behind the first `used_bytes`, which the owner uses. Raises NoRoom."""
        first = self._place(num_bytes)
        if self.own_bytes_after(num_bytes) < used_bytes:
            raise NoRoom(
                f"{num_bytes} bytes do not fit beside {used_bytes} bytes in use and "
                f"{self.num_given_up_bytes} given up of {self.num_bytes}; give back some"
            )
        region = Region(first, num_bytes, self.memory[first : first + num_bytes])
        self._regions.append(region)
        self._drop(used_bytes, self._own_end_byte)
        return region

    def take_back(self, region: Region) -> None:
        """The owner may use as many bytes again. Idempotent."""
        if region not in self._regions:
            return
        self._regions.remove(region)
        self._drop(region.first_byte, region.end_byte)

    def grow(self, num_bytes: int) -> int:
        """Makes `num_bytes` more usable, or as many as address space is reserved for; returns how many."""
        more = min(num_bytes, self._max_bytes - self.num_bytes)
        self.num_bytes += more
        return more

    def shrink(self, num_bytes: int, used_bytes: int) -> None:
        """Undoes `grow`. Raises NoRoom where the owner uses more than would be left."""
        end_byte = self._own_end_byte
        self.num_bytes -= num_bytes
        if self.own_bytes < used_bytes:
            self.num_bytes += num_bytes
            raise NoRoom(f"{used_bytes} bytes are in use; {num_bytes} of {self.num_bytes} cannot be dropped")
        self._drop(used_bytes, end_byte)

    def touch(self, first_byte: int, end_byte: int) -> bool:
        """Takes the pages of a span now, without a change of what is in them; False where that cannot be.

        From any thread, also while the span is in use.
        """
        if self._map is None:
            return True
        first, end = first_byte // _PAGE_BYTES * _PAGE_BYTES, min(end_byte, len(self.memory))
        for start in range(first, end, _TOUCH_BYTES):
            if error := self._advise(_POPULATE_WRITE, start, min(start + _TOUCH_BYTES, end)):
                _log.info("pages_not_touched_ahead", reason=error)
                return False
        return True

    def _place(self, num_bytes: int) -> int:
        """First byte of the best place for a region: the smallest hole behind another one, else before all.

        The hole before the first region is the owner's, so it comes last. Below 0 where nothing fits.
        """
        ordered = sorted(self._regions, key=lambda region: region.first_byte)
        edges = [*(region.first_byte for region in ordered), len(self.memory)]
        holes = [(end - one.end_byte, end) for one, end in zip(ordered, edges[1:], strict=True)]
        for size, end in sorted(holes):
            if self._aligned(end - num_bytes) >= end - size:
                return self._aligned(end - num_bytes)
        return self._aligned(edges[0] - num_bytes)

    def _aligned(self, first_byte: int) -> int:
        return first_byte // self._alignment_bytes * self._alignment_bytes

    def _drop(self, first_byte: int, end_byte: int) -> None:
        """Gives whole pages of a span back to the machine; they are zero when they are touched again."""
        first = -(-first_byte // _PAGE_BYTES) * _PAGE_BYTES
        if self._map is None or end_byte <= first:
            return
        self._advise(mmap.MADV_DONTNEED, first, end_byte)

    def _advise(self, advice: int, first_byte: int, end_byte: int) -> str:
        """Empty, or what was wrong. Other threads go on meanwhile, which `mmap.madvise` does not let them."""
        address, num_bytes = self.memory.data_ptr() + first_byte, end_byte - first_byte
        if not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice):
            return ""
        return os.strerror(ctypes.get_errno())


def _reserve(max_bytes: int) -> mmap.mmap:
    """Address space without memory; no more than needed where the machine gives out what it has only."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        reserved = mmap.mmap(-1, _SPARE_SPACE * max_bytes + _TOUCH_BYTES, flags=flags)
    except OSError as error:
        _log.info("address_space_is_short", reason=str(error))
        reserved = mmap.mmap(-1, max_bytes + _TOUCH_BYTES, flags=flags)
    if max_bytes >= 2 * _TOUCH_BYTES:
        reserved.madvise(mmap.MADV_HUGEPAGE)
    return reserved
