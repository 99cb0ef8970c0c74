"""Buffers: size classes, reuse, and the cap on what lies idle."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.transport import pool as pool_module
from libs.transport.memory import Memory, view
from libs.transport.pool import SMALLEST_CLASS_BYTES, BufferPool, allocate_host, size_class_bytes

KIB = 1 << 10


@given(st.integers(0, 1 << 40))
def test_a_class_holds_the_size_and_wastes_at_most_a_quarter(num_bytes: int) -> None:
    class_bytes = size_class_bytes(num_bytes)
    assert class_bytes >= num_bytes
    assert class_bytes == SMALLEST_CLASS_BYTES or class_bytes <= num_bytes * 1.25 + 1
    assert size_class_bytes(class_bytes) == class_bytes


class Counting:
    """Buffers that are only counted."""

    def __init__(self) -> None:
        self.made: list[Memory] = []
        self.dismissed: list[Memory] = []

    def make(self, num_bytes: int) -> Memory:
        self.made.append(Memory(len(self.made) + 1, num_bytes, None))
        return self.made[-1]

    def pool(self, cap_bytes: int) -> BufferPool[Memory]:
        return BufferPool(cap_bytes, self.make, self.dismissed.append)


def test_a_buffer_given_back_is_taken_again() -> None:
    counting = Counting()
    pool = counting.pool(1 << 30)
    first = pool.take(100_000)
    pool.give(first)
    assert pool.take(99_000) is first
    assert pool.take(99_000) is not first
    assert len(counting.made) == 2


def test_beyond_the_cap_the_class_that_was_longest_unused_goes_first() -> None:
    counting = Counting()
    pool = counting.pool(256 * KIB)
    small, large = pool.take(64 * KIB), pool.take(192 * KIB)
    pool.give(small)
    pool.give(large)
    assert pool.idle_bytes == 256 * KIB
    other = pool.take(128 * KIB)
    pool.give(other)
    assert counting.dismissed == [small, large]
    assert pool.idle_bytes == 128 * KIB


@given(
    st.integers(0, 1 << 20),
    st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 19)), max_size=60),
)
def test_counts_are_exact_and_idle_memory_stays_below_the_cap(
    cap_bytes: int, steps: list[tuple[bool, int]]
) -> None:
    counting = Counting()
    pool = counting.pool(cap_bytes)
    taken: list[Memory] = []
    for is_take, size in steps:
        if is_take:
            taken.append(pool.take(size))
            assert taken[-1].num_bytes >= size
        elif taken:
            pool.give(taken.pop(size % len(taken)))
        assert pool.idle_bytes <= cap_bytes
        assert pool.taken_bytes == sum(buffer.num_bytes for buffer in taken)
        alive = sum(b.num_bytes for b in counting.made) - sum(b.num_bytes for b in counting.dismissed)
        assert alive == pool.taken_bytes + pool.idle_bytes
    assert len({id(buffer) for buffer in taken}) == len(taken)


def test_a_new_buffer_pushes_idle_ones_out_when_all_together_would_exceed_the_cap() -> None:
    pool = Counting().pool(256 * KIB)
    buffer = pool.take(192 * KIB)
    pool.give(buffer)
    pool.take(128 * KIB)
    assert pool.idle_bytes == 0


@pytest.mark.parametrize("num_bytes", [64 * KIB, 4 << 20, 80 << 20])
def test_host_memory_is_writable_and_freed_with_its_last_view(num_bytes: int) -> None:
    memory = allocate_host(num_bytes)
    body = view(memory)
    body[-1] = 7
    assert (body.nbytes, body[-1]) == (num_bytes, 7)
    alive = weakref.ref(memory.owner)  # type: ignore[arg-type]
    del memory, body
    gc.collect()
    assert alive() is None


def test_pages_are_faulted_in_also_where_the_kernel_cannot_be_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "MADV_POPULATE_WRITE", 12345)
    assert np.array_equal(view(allocate_host(64 * KIB)), np.zeros(64 * KIB, dtype=np.uint8))
