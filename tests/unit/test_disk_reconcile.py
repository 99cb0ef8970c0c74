from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.kv_store.disk.layout import Form, Spot
from services.kv_store.disk.reconcile import parents_first, reconcile
from services.kv_store.disk.record import Record

FORM = Form(2, 10, 4)
OTHER = Form(2, 20, 4)
CAP_BYTES = 1 << 30


def record(segment: int, slot: int, order: int, *, form: Form = FORM, parent: bytes = b"") -> Record:
    return Record(Spot(segment, slot, form), parent, order, 1.5, 0, np.empty(0, np.uint64))


def held_and_lost(
    records: list[tuple[bytes, Record | None]], files: dict[int, tuple[Form, int]], cap_bytes: int
) -> tuple[set[bytes], set[bytes]]:
    held, lost = reconcile(records, files, cap_bytes)
    assert held.keys() <= files.keys()
    assert all(one.spot.segment == number for number, blocks in held.items() for one in blocks.values())
    return {name for blocks in held.values() for name in blocks}, set(lost)


def test_a_block_whose_file_holds_its_slot_is_held() -> None:
    files = {3: (FORM, FORM.end_of(1))}
    assert held_and_lost([(b"a", record(3, 1, 1))], files, CAP_BYTES) == ({b"a"}, set())


def test_a_block_beyond_the_end_of_its_file_is_lost() -> None:
    records = [(b"a", record(3, 0, 1)), (b"b", record(3, 1, 2))]
    files = {3: (FORM, FORM.end_of(1) - 1)}
    assert held_and_lost(records, files, CAP_BYTES) == ({b"a"}, {b"b"})


def test_blocks_of_missing_files_other_forms_and_unreadable_records_are_lost() -> None:
    records = [(b"a", record(1, 0, 1)), (b"b", record(2, 0, 2)), (b"c", None)]
    assert held_and_lost(records, {2: (OTHER, 10_000)}, CAP_BYTES) == (set(), {b"a", b"b", b"c"})


def test_over_the_cap_the_files_written_longest_ago_go_whole() -> None:
    records = [
        (b"a", record(0, 0, 1)),
        (b"b", record(1, 0, 2)),
        (b"c", record(0, 1, 3)),
        (b"d", record(2, 0, 4)),
    ]
    files = dict.fromkeys(range(3), (FORM, 100))
    assert held_and_lost(records, files, 250) == ({b"a", b"c", b"d"}, {b"b"})


@given(st.integers(1, 30), st.randoms())
def test_every_parent_that_is_held_comes_before_its_children(num_blocks: int, rnd: Random) -> None:
    orders = list(range(num_blocks))
    rnd.shuffle(orders)
    held = {
        bytes([i + 1]): record(0, i, orders[i], parent=bytes([(i + 1) // 2]) if i else b"")
        for i in range(num_blocks)
        if i % 5 != 4
    }
    listed = [block.name for block in parents_first(held)]
    assert sorted(listed) == sorted(held)
    for block in parents_first(held):
        if block.parent in held:
            assert listed.index(block.parent) < listed.index(block.name)


def test_a_block_that_is_its_own_ancestor_ends_nothing() -> None:
    held = {b"a": record(0, 0, 1, parent=b"b"), b"b": record(0, 1, 2, parent=b"a")}
    assert {block.name for block in parents_first(held)} == {b"a", b"b"}
