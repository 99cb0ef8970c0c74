"""Memory of the blocks that a store holds: pages of [num_layers, num_rows, layer_bytes], one shape per page.

A block is a *slot*: a row of a page. Neighbours of a chain get neighbouring rows where there are any, so that
a layer of a whole run is one piece of memory. Pages are kept for reuse, by any shape once they are empty: a
first touch of fresh memory costs many times a copy into warm one.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libs.kv.runs import RUN_BLOCKS

Shape = tuple[int, int]
"""Layers, and bytes of one block in one layer."""
Slots = NDArray[np.int64]
Bytes = NDArray[np.uint8]

PAGE_BYTES = 64 << 20
MIN_PAGE_BYTES = 1 << 20
_PAGES_PER_BUDGET = 16
_ROW_BITS = 24
_ROW_MASK = (1 << _ROW_BITS) - 1
_MAX_SEARCHED = 16


def make_memory(num_bytes: int, *, touched: bool) -> Bytes:
    """Fresh memory, in huge pages where the system has them. `touched`: faulted in, which takes a while."""
    mapped = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    if touched:
        memory[:: mmap.PAGESIZE] = 0
    return memory


@dataclass(slots=True, eq=False)
class _Page:
    memory: Bytes
    shape: Shape
    data: Bytes = field(init=False)
    checksums: NDArray[np.uint64] = field(init=False)
    is_free: NDArray[np.bool_] = field(init=False)
    num_free: int = field(init=False)

    def __post_init__(self) -> None:
        self.take_shape(self.shape)

    def take_shape(self, shape: Shape) -> None:
        num_layers, layer_bytes = self.shape = shape
        num_rows = min(self.memory.size // (num_layers * layer_bytes), _ROW_MASK)
        used = self.memory[: num_layers * num_rows * layer_bytes]
        self.data = used.reshape(num_layers, num_rows, layer_bytes)
        self.checksums = np.zeros((num_layers, num_rows), dtype=np.uint64)
        self.is_free = np.ones(num_rows, dtype=np.bool_)
        self.num_free = num_rows

    @property
    def is_empty(self) -> bool:
        return self.num_free == self.is_free.size

    def free_runs(self) -> list[tuple[int, int]]:
        """First row and length of each, the longest first."""
        edges = np.flatnonzero(np.diff(self.is_free, prepend=False, append=False))
        runs = [(int(first), int(end - first)) for first, end in edges.reshape(-1, 2)]
        return sorted(runs, key=lambda run: -run[1])


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring rows of one page: `data` [num_layers, num_rows, layer_bytes] and their checksums. They are
    the blocks from `first` on of those asked for."""

    first: int
    data: Bytes
    checksums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbours among the blocks of a put that are neighbours in memory, too: blocks `first`.. lie in rows
    `row`.. of [num_layers, num_rows, layer_bytes] and of the checksums."""

    first: int
    num_blocks: int
    row: int
    data: Bytes
    checksums: NDArray[np.uint64]


class Slab:
    """Slots for blocks. Never more memory than `budget_bytes`, in use and in reserve together."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._page_bytes = min(
            budget_bytes, max(MIN_PAGE_BYTES, min(PAGE_BYTES, budget_bytes // _PAGES_PER_BUDGET))
        )
        self._pages: dict[int, _Page] = {}
        self._num_made = 0
        self._spare: Bytes | None = None
        self.num_allocated_bytes = 0
        """In use and in reserve."""
        self.num_used_bytes = 0

    def num_missing(self, num_blocks: int, shape: Shape) -> int:
        """How many blocks of this shape should go, at least, before `allocate` can succeed."""
        return max(0, num_blocks - self._num_free(shape))

    def allocate(self, num_blocks: int, shape: Shape) -> Slots | None:
        """Slots, neighbours as far as possible; None, and none is taken, where there is too little room."""
        while self._num_room(shape) < num_blocks:
            if not self._add_page(shape):
                return None
        slots: list[NDArray[np.int64]] = []
        while num_blocks:
            number, first, length = self._best_run(num_blocks, shape)
            length = min(length, num_blocks)
            page = self._pages[number]
            page.is_free[first : first + length] = False
            page.num_free -= length
            slots.append(np.arange(first, first + length, dtype=np.int64) | number << _ROW_BITS)
            self.num_used_bytes += length * shape[0] * shape[1]
            num_blocks -= length
        return np.concatenate(slots) if slots else np.empty(0, dtype=np.int64)

    def free(self, slots: Slots) -> None:
        """Give slots back."""
        for number, rows in self._rows_by_page(slots):
            page = self._pages[number]
            page.is_free[rows] = True
            page.num_free += rows.size
            self.num_used_bytes -= rows.size * page.shape[0] * page.shape[1]

    def pieces(self, slots: Slots, layers: range) -> Iterator[Piece]:
        """The memory of these layers of these blocks, in as few pieces as it lies in."""
        ends = [*(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), slots.size]
        first = 0
        for end in ends:
            page = self._pages[int(slots[first]) >> _ROW_BITS]
            row = int(slots[first]) & _ROW_MASK
            rows = slice(row, row + end - first)
            within = slice(layers.start, layers.stop)
            yield Piece(first, page.data[within, rows], page.checksums[within, rows])
            first = end

    def stretches(self, slots: Slots, numbers: NDArray[np.int64]) -> list[Stretch]:
        """Where blocks with these rising numbers lie, for good: as long as the slots are not freed."""
        if not slots.size:
            return []
        breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(numbers) != 1)) + 1
        starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), slots.size]
        found: list[Stretch] = []
        for start, end in zip(starts, ends, strict=True):
            page, row = self._pages[int(slots[start]) >> _ROW_BITS], int(slots[start]) & _ROW_MASK
            found.append(Stretch(int(numbers[start]), end - start, row, page.data, page.checksums))
        return found

    def page_to_make(self) -> int:
        """Bytes of the page that will be needed next and is not in reserve; 0: none will."""
        left = self.budget_bytes - self.num_allocated_bytes
        return self._page_bytes if self._spare is None and left >= self._page_bytes else 0

    def keep(self, memory: Bytes) -> None:
        """Take a page made beforehand in reserve, if there is still need of it."""
        if self.page_to_make() == memory.size:
            self._spare = memory
            self.num_allocated_bytes += memory.size

    def _num_free(self, shape: Shape) -> int:
        block_bytes = shape[0] * shape[1]
        left = (
            self.budget_bytes
            - self.num_allocated_bytes
            + (self._spare.size if self._spare is not None else 0)
        )
        empty = sum(p.memory.size for p in self._pages.values() if p.shape != shape and p.is_empty)
        return self._num_room(shape) + (left + empty) // block_bytes

    def _num_room(self, shape: Shape) -> int:
        return sum(page.num_free for page in self._pages.values() if page.shape == shape)

    def _add_page(self, shape: Shape) -> bool:
        block_bytes = shape[0] * shape[1]
        for page in self._pages.values():
            if page.shape != shape and page.is_empty and page.memory.size >= block_bytes:
                page.take_shape(shape)
                return True
        # A whole run in one page travels without being gathered.
        self._page_bytes = max(self._page_bytes, min(RUN_BLOCKS * block_bytes, self.budget_bytes // 4))
        if self._spare is not None and self._spare.size >= max(self._page_bytes, block_bytes):
            memory, self._spare = self._spare, None
        else:
            self._give_up_reserve(shape)
            left = self.budget_bytes - self.num_allocated_bytes
            if left < block_bytes:
                return False
            num_bytes = min(left, max(self._page_bytes, block_bytes))
            memory = make_memory(num_bytes - num_bytes % block_bytes, touched=False)
            self.num_allocated_bytes += memory.size
        self._pages[self._num_made] = _Page(memory, shape)
        self._num_made += 1
        return True

    def _give_up_reserve(self, shape: Shape) -> None:
        """Let go of empty pages that are too small for a block of this shape, until there is room for it."""
        if self._spare is not None:
            self.num_allocated_bytes -= self._spare.size
            self._spare = None
        for number in [n for n, page in self._pages.items() if page.is_empty and page.shape != shape]:
            if self.budget_bytes - self.num_allocated_bytes >= shape[0] * shape[1]:
                return
            self.num_allocated_bytes -= self._pages.pop(number).memory.size

    def _best_run(self, num_blocks: int, shape: Shape) -> tuple[int, int, int]:
        """Page, first row and length of a run that fits, or of the longest of those looked at."""
        best = (0, 0, 0)
        candidates = [n for n, page in self._pages.items() if page.shape == shape and page.num_free]
        for number in candidates[:_MAX_SEARCHED]:
            first, length = self._pages[number].free_runs()[0]
            if length > best[2]:
                best = (number, first, length)
            if length >= num_blocks:
                break
        return best

    def _rows_by_page(self, slots: Slots) -> Iterator[tuple[int, NDArray[np.int64]]]:
        numbers = slots >> _ROW_BITS
        for number in np.unique(numbers).tolist():
            yield number, slots[numbers == number] & _ROW_MASK
