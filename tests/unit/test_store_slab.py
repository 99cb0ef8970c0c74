"""Memory of blocks: slots hold what is written, are neighbours where possible, and stay within the budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv_store.slab import Slab, Slots, make_memory


def fill(slab: Slab, slots: Slots, shape: tuple[int, int], value: int) -> None:
    for piece in slab.pieces(slots, range(shape[0])):
        piece.data[:] = value
        piece.checksums[:] = value


def values(slab: Slab, slots: Slots, shape: tuple[int, int]) -> set[int]:
    pieces = list(slab.pieces(slots, range(shape[0])))
    return {int(v) for p in pieces for v in (*np.unique(p.data), *np.unique(p.checksums))}


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from([(3, 64), (2, 100), (1, 2000)]), st.integers(0, 9)),
        max_size=30,
    )
)
def test_slots_never_share_memory_and_the_budget_holds(steps: list[tuple[int, tuple[int, int], int]]) -> None:
    slab = Slab(20_000)
    held: list[tuple[Slots, tuple[int, int], int]] = []
    for value, (num_blocks, shape, victim) in enumerate(steps, start=1):
        slots = slab.allocate(num_blocks, shape)
        if slots is not None:
            assert slots.size == num_blocks
            fill(slab, slots, shape, value)
            held.append((slots, shape, value))
        elif held:
            slab.free(held.pop(victim % len(held))[0])
        assert slab.num_allocated_bytes <= 20_000
        assert slab.num_used_bytes == sum(s.size * shape[0] * shape[1] for s, shape, _ in held)
        for slots, shape, value in held:
            assert values(slab, slots, shape) == {value}
    for slots, _, _ in held:
        slab.free(slots)
    assert slab.num_used_bytes == 0
    assert slab.allocate(9, (1, 2000)) is not None


def test_blocks_of_one_put_are_neighbours_although_others_went_between_them() -> None:
    slab = Slab(100 * 192)
    first = slab.allocate(64, (3, 64))
    assert first is not None
    slab.free(first[::2])
    run = slab.allocate(32, (3, 64))
    assert run is not None
    assert len(list(slab.pieces(run, range(1, 2)))) == 1


def test_what_is_free_in_parts_serves_a_put_in_parts() -> None:
    slab = Slab(64 * 192)
    first = slab.allocate(64, (3, 64))
    assert first is not None
    slab.free(first[::2])
    assert slab.num_missing(33, (3, 64)) == 1
    assert slab.allocate(33, (3, 64)) is None
    run = slab.allocate(32, (3, 64))
    assert run is not None
    assert len(list(slab.pieces(run, range(3)))) == 32


@given(st.sets(st.integers(0, 59), min_size=1), st.sets(st.integers(0, 99)))
def test_stretches_are_the_same_memory_as_pieces(numbers: set[int], taken: set[int]) -> None:
    slab = Slab(100 * 192)
    every = slab.allocate(100, (3, 64))
    assert every is not None
    slab.free(every[[at for at in range(100) if at not in taken or len(taken) > 40]])
    rising = np.array(sorted(numbers), dtype=np.int64)
    slots = slab.allocate(rising.size, (3, 64))
    assert slots is not None
    for stretch in slab.stretches(slots, rising):
        for at in range(stretch.num_blocks):
            stretch.data[:, stretch.row + at] = stretch.first + at
            stretch.checksums[:, stretch.row + at] = stretch.first + at
    for number, slot in zip(rising.tolist(), slots, strict=True):
        assert values(slab, np.array([slot]), (3, 64)) == {number}


def test_a_page_made_beforehand_is_used_and_counts_from_the_start() -> None:
    slab = Slab(4 << 20)
    num_bytes = slab.page_to_make()
    slab.keep(make_memory(num_bytes, touched=True))
    assert slab.num_allocated_bytes == num_bytes
    assert slab.page_to_make() == 0
    assert slab.allocate(1, (4, 1024)) is not None
    assert slab.num_allocated_bytes == num_bytes
    slab.keep(make_memory(7, touched=True))
    assert slab.num_allocated_bytes == num_bytes


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_block_larger_than_the_budget_has_no_room(num_blocks: int) -> None:
    slab = Slab(1000)
    slots = slab.allocate(num_blocks, (1 << 40, 1 << 40))
    assert (slots is None) == bool(num_blocks)
