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


def test_a_block_whose_file_holds_its_slot_is_held() -> None:
    found = reconcile([(b"a", record(3, 1, 1))], {3: (FORM, FORM.end_of(1))}, CAP_BYTES)
    assert list(found.held) == [b"a"]
    assert not found.lost
    assert not found.unused


def test_a_block_beyond_the_end_of_its_file_is_lost() -> None:
    records = [(b"a", record(3, 0, 1)), (b"b", record(3, 1, 2))]
    found = reconcile(records, {3: (FORM, FORM.end_of(1) - 1)}, CAP_BYTES)
    assert list(found.held) == [b"a"]
    assert found.lost == [b"b"]


def test_blocks_of_missing_files_other_forms_and_unreadable_records_are_lost() -> None:
    records = [(b"a", record(1, 0, 1)), (b"b", record(2, 0, 2)), (b"c", None)]
    found = reconcile(records, {2: (OTHER, 10_000)}, CAP_BYTES)
    assert not found.held
    assert found.lost == [b"a", b"b", b"c"]
    assert found.unused == {2: OTHER}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=30), st.randoms())
def test_of_several_claims_to_a_slot_the_latest_holds(places: list[tuple[int, int]], rnd: Random) -> None:
    records = [(bytes([order]), record(*place, order)) for order, place in enumerate(places)]
    latest = {place: bytes([order]) for order, place in enumerate(places)}
    rnd.shuffle(records)
    found = reconcile(records, dict.fromkeys(range(3), (FORM, 10000)), CAP_BYTES)
    assert set(found.held) == set(latest.values())
    assert sorted(found.lost + list(found.held)) == sorted(name for name, _ in records)


def test_over_the_cap_the_files_written_longest_ago_go_whole() -> None:
    records = [
        (b"a", record(0, 0, 1)),
        (b"b", record(1, 0, 2)),
        (b"c", record(0, 1, 3)),
        (b"d", record(2, 0, 4)),
    ]
    files = dict.fromkeys(range(3), (FORM, 100))
    found = reconcile(records, files, 250)
    assert set(found.held) == {b"a", b"c", b"d"}
    assert found.lost == [b"b"]
    assert set(found.unused) == {1}


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
