"""Who holds what: the view against a plain set, and its bounds."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.bus.messages.kv_events import Cleared, Removed, Stored, Tier
from libs.kv_events.view import KvView

NAMES = [bytes([n]) * 16 for n in range(10)]
HOLDERS = ["p0", "p1", "s0"]
TIERS = {"p0": [Tier.DEVICE], "p1": [Tier.DEVICE], "s0": [Tier.DRAM, Tier.DISK]}
SOME_NAMES = st.lists(st.sampled_from(NAMES), max_size=6)


def joined(*numbers: int) -> bytes:
    return b"".join(NAMES[n] for n in numbers)


@dataclass
class Truth:
    held: set[tuple[str, Tier, bytes]] = field(default_factory=set)

    def has(self, holder: str, tier: Tier, name: bytes) -> bool:
        return (holder, tier, name) in self.held


class ViewMachine(RuleBasedStateMachine):
    """Any events of any holders, deaths, replacements and sweeps, against a set of triples."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.truth = KvView(1000), Truth()

    @rule(holder=st.sampled_from(HOLDERS), second=st.booleans(), names=SOME_NAMES)
    def store(self, holder: str, second: bool, names: list[bytes]) -> None:
        tier = TIERS[holder][second and len(TIERS[holder]) > 1]
        self.view.apply(holder, Stored(tier, b"".join(names)))
        self.truth.held |= {(holder, tier, name) for name in names}

    @rule(holder=st.sampled_from(HOLDERS), names=SOME_NAMES)
    def remove(self, holder: str, names: list[bytes]) -> None:
        tier = TIERS[holder][0]
        self.view.apply(holder, Removed(tier, b"".join(names)))
        self.truth.held -= {(holder, tier, name) for name in names}

    @rule(holder=st.sampled_from(HOLDERS), second=st.booleans())
    def clear(self, holder: str, second: bool) -> None:
        tier = TIERS[holder][second and len(TIERS[holder]) > 1]
        self.view.apply(holder, Cleared(tier))
        self.truth.held = {t for t in self.truth.held if t[:2] != (holder, tier)}

    @rule(holder=st.sampled_from(HOLDERS))
    def die(self, holder: str) -> None:
        self.view.forget(holder)
        self.truth.held = {t for t in self.truth.held if t[0] != holder}

    @rule(holder=st.sampled_from(HOLDERS), names=SOME_NAMES)
    def tell_anew(self, holder: str, names: list[bytes]) -> None:
        tier = TIERS[holder][0]
        self.view.fill("draft", Stored(tier, b"".join(names)))
        self.view.replace(holder, "draft")
        self.truth.held = {t for t in self.truth.held if t[0] != holder}
        self.truth.held |= {(holder, tier, name) for name in names}

    @rule(num_names=st.integers(0, 4))
    def sweep(self, num_names: int) -> None:
        self.view.sweep(num_names)

    @rule(names=SOME_NAMES)
    def find(self, names: list[bytes]) -> None:
        found = self.view.find(b"".join(names))
        slots = self.view.slots(HOLDERS)
        for holder, slot in zip(HOLDERS, slots, strict=True):
            expected = leading(names, lambda name, h=holder: self.truth.has(h, Tier.DEVICE, name))
            assert (int(found.by_slot[slot]) if slot >= 0 else 0) == expected
        in_store = [any(self.truth.has("s0", t, n) for t in (Tier.DRAM, Tier.DISK)) for n in names]
        on_disk = [
            store and not self.truth.has("s0", Tier.DRAM, n) for store, n in zip(in_store, names, strict=True)
        ]
        for position in range(found.num_blocks + 1):
            assert found.disk_before[position] == sum(on_disk[:position])
            run = leading(in_store[position : found.num_blocks], bool)
            assert found.store_end[position] == position + run

    @invariant()
    def every_block_is_where_it_is(self) -> None:
        for holder in HOLDERS:
            for name in NAMES:
                expected = {tier for tier in Tier if self.truth.has(holder, tier, name)}
                assert self.view.tiers_of(holder, name) == expected


def leading(items: list, holds) -> int:  # type: ignore[no-untyped-def, type-arg]  # any items, any predicate
    return next((n for n, item in enumerate(items) if not holds(item)), len(items))


TestViewMachine = ViewMachine.TestCase


def test_the_view_is_bounded_and_forgets_what_was_told_longest_ago() -> None:
    view = KvView(4)
    for number in range(6):
        view.apply("p0", Stored(Tier.DEVICE, joined(number)))
    assert len(view) == 4
    assert view.num_forgotten_total == 2
    assert [bool(view.tiers_of("p0", name)) for name in NAMES[:6]] == [False, False, True, True, True, True]


def test_what_is_asked_for_stays_and_a_chain_loses_its_end_first() -> None:
    view = KvView(4)
    view.apply("p0", Stored(Tier.DEVICE, joined(0, 1)))
    view.apply("p0", Stored(Tier.DEVICE, joined(2, 3)))
    assert view.find(joined(0, 1)).num_blocks == 2
    view.apply("p0", Stored(Tier.DEVICE, joined(4)))
    assert not view.tiers_of("p0", NAMES[3])
    view.apply("p0", Stored(Tier.DEVICE, joined(5, 6)))
    assert view.find(joined(0, 1)).num_blocks == 1


def test_what_was_there_before_fills_free_room_and_displaces_nothing() -> None:
    view = KvView(4)
    view.apply("p0", Stored(Tier.DEVICE, joined(0, 1)))
    view.fill("s0", Stored(Tier.DRAM, joined(1, 2, 3, 4, 5)))
    assert [len(view.tiers_of("s0", name)) for name in NAMES[:6]] == [0, 1, 1, 1, 0, 0]
    assert view.find(joined(0, 1)).num_blocks == 2
    assert (len(view), view.num_forgotten_total) == (4, 2)
    view.apply("p0", Stored(Tier.DEVICE, joined(6)))
    assert [bool(view.tiers_of("s0", name)) for name in NAMES[1:4]] == [True, True, False]


@given(st.integers(1, 6))
def test_swept_slots_are_used_again_however_often_holders_change(num_names: int) -> None:
    view = KvView(100)
    for generation in range(40):
        view.apply(f"p{generation}", Stored(Tier.DEVICE, joined(*range(num_names))))
        view.forget(f"p{generation}")
        while view.sweep(3):
            pass
    view.apply("last", Stored(Tier.DEVICE, joined(0)))
    assert view.slots(["last"])[0] <= 1
    assert len(view) == 1


def test_a_sweep_ends_also_when_all_it_had_to_sweep_is_removed_meanwhile() -> None:
    view = KvView(100)
    view.apply("p0", Stored(Tier.DEVICE, joined(0, 1, 2)))
    view.apply("p1", Stored(Tier.DEVICE, joined(0, 1, 2)))
    view.forget("p0")
    assert view.sweep(1)
    view.apply("p1", Removed(Tier.DEVICE, joined(0, 1, 2)))
    for _ in range(4):
        view.sweep(1)
    assert not view.sweep(1)
    assert len(view) == 0


def test_nobody_in_particular_holds_a_chain_that_was_never_told() -> None:
    view = KvView(10)
    found = view.find(joined(0, 1))
    assert (found.num_blocks, found.store_end.tolist(), found.disk_before.tolist()) == (0, [0], [0])
    assert np.array_equal(view.slots(["p0"]), [-1])


def test_a_view_of_no_names_is_refused() -> None:
    with pytest.raises(ValueError, match="max_names is 0"):
        KvView(0)
