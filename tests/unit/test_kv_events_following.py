"""A publisher and a follower over a bus that loses, doubles and reorders: in the end the view is right."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from libs.bus.messages.kv_events import KvEvent, KvEvents, KvSnapshotPage, Stored, Tier
from libs.bus.messages.presence import ServiceKind
from libs.kv_events.follower import Follower, SnapshotReader
from libs.kv_events.log import KvEventLog
from libs.kv_events.snapshots import TOO_LATE, SnapshotPages
from libs.kv_events.view import KvView

NAMES = [bytes([n]) * 16 for n in range(8)]
SOME = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
BOTH = st.sampled_from([Tier.DRAM, Tier.DISK])


class Publisher:
    """Log and pages as `KvEventPublisher` wires them, and what is really held."""

    def __init__(self, max_waiting: int = 12) -> None:
        self.log, self.pages = KvEventLog(max_waiting), SnapshotPages(2, max_walks=2)
        self.held: dict[tuple[Tier, bytes], None] = {}

    def holdings(self) -> Iterator[tuple[Tier, list[bytes]]]:
        # Made while it is read, so that it sees what changes while it goes.
        for key in [(tier, name) for tier in (Tier.DRAM, Tier.DISK) for name in NAMES]:
            if key in self.held:
                yield key[0], [key[1]]

    def message(self) -> KvEvents:
        events = self.log.take(3)
        return KvEvents(publisher="s0", kind=ServiceKind.KV_STORE, sequence=self.log.sequence, events=events)


class Network(RuleBasedStateMachine):
    """Messages under way in a list; the follower reads snapshots a page at a time in between."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher, self.view = Publisher(), KvView(1000)
        self.follower = Follower(max_kept_names=6)
        self.under_way: list[KvEvents] = []
        self.reader: SnapshotReader | None = None

    @rule(tier=BOTH, names=SOME)
    def store(self, tier: Tier, names: list[bytes]) -> None:
        self.publisher.held |= {(tier, name): None for name in names}
        self.publisher.log.stored(tier, names)

    @rule(tier=BOTH, names=SOME)
    def remove(self, tier: Tier, names: list[bytes]) -> None:
        for name in names:
            self.publisher.held.pop((tier, name), None)
        self.publisher.log.removed(tier, names)

    @rule(tier=BOTH)
    def clear(self, tier: Tier) -> None:
        self.publisher.held = {key: None for key in self.publisher.held if key[0] is not tier}
        self.publisher.log.cleared(tier)

    @rule()
    def publish(self) -> None:
        self.under_way.append(self.publisher.message())

    @precondition(lambda self: self.under_way)
    @rule(nth=st.integers(0, 5), again=st.booleans())
    def deliver(self, nth: int, again: bool) -> None:
        nth %= len(self.under_way)
        self.hear(self.under_way[nth] if again else self.under_way.pop(nth))

    @precondition(lambda self: self.under_way)
    @rule(nth=st.integers(0, 5))
    def lose(self, nth: int) -> None:
        self.under_way.pop(nth % len(self.under_way))

    @precondition(lambda self: self.follower.is_behind)
    @rule()
    def read_a_page(self) -> None:
        if self.reader is None:
            self.reader = SnapshotReader()
            self.view.forget("draft")
            page = self.publisher.pages.begin(self.publisher.holdings(), self.publisher.log.sequence)
        else:
            assert self.reader.next_page is not None
            page = self.publisher.pages.turn(self.reader.next_page)
        for stored in self.reader.read(page):
            self.view.fill("draft", stored)
        if self.reader.next_page is None:
            self.end_snapshot(self.reader)
            self.reader = None

    @rule()
    def another_follower_takes_the_pages(self) -> None:
        for _ in range(2):
            self.publisher.pages.begin(self.publisher.holdings(), self.publisher.log.sequence)

    @rule()
    def sweep(self) -> None:
        self.view.sweep(2)

    def end_snapshot(self, reader: SnapshotReader) -> None:
        if not reader.is_whole or reader.sequence is None:
            return
        events = self.follower.catch_up(reader.sequence)
        if events is not None:
            for event in events:
                self.view.apply("draft", event)
            self.view.replace("s0", "draft")

    def hear(self, message: KvEvents) -> None:
        for event in self.follower.hear(message):
            self.view.apply("s0", event)

    def teardown(self) -> None:
        while self.under_way:
            self.hear(self.under_way.pop(0))
        while self.publisher.log.is_due:
            self.hear(self.publisher.message())
        self.hear(self.publisher.message())
        for _ in range(100):
            if not self.follower.is_behind:
                break
            self.read_a_page()
        told = {(tier, name) for name in NAMES for tier in self.view.tiers_of("s0", name)}
        assert told == set(self.publisher.held)


TestNetwork = Network.TestCase


def message(sequence: int, *names: bytes) -> KvEvents:
    events: list[KvEvent] = [Stored(Tier.DRAM, name) for name in names]
    return KvEvents(publisher="s0", kind=ServiceKind.KV_STORE, sequence=sequence, events=events)


def in_step(sequence: int) -> Follower:
    follower = Follower()
    assert follower.catch_up(sequence) == []
    return follower


def test_a_new_publisher_is_behind_until_a_snapshot_whatever_it_says_first() -> None:
    follower = Follower()
    assert follower.is_behind
    assert follower.hear(message(1, NAMES[0])) == []
    assert follower.catch_up(1) == []
    assert not follower.is_behind


def test_in_step_the_next_message_is_applied_and_a_double_is_not() -> None:
    follower = in_step(3)
    assert follower.hear(message(4, NAMES[0])) == [Stored(Tier.DRAM, NAMES[0])]
    assert follower.hear(message(4, NAMES[0])) == []
    assert not follower.is_behind


def test_a_gap_keeps_what_comes_until_a_snapshot_it_fits_on() -> None:
    follower = in_step(3)
    assert follower.hear(message(6, NAMES[6])) == []
    assert follower.is_behind
    assert follower.catch_up(4) is None
    assert follower.hear(message(7, NAMES[7])) == []
    assert follower.catch_up(5) == [Stored(Tier.DRAM, NAMES[6]), Stored(Tier.DRAM, NAMES[7])]
    assert follower.hear(message(8, NAMES[0])) == [Stored(Tier.DRAM, NAMES[0])]


@given(st.integers(1, 40))
def test_what_is_kept_is_bounded(num_messages: int) -> None:
    follower = Follower(max_kept_names=4)
    for sequence in range(2, 2 + num_messages):
        follower.hear(message(sequence, *NAMES[:2]))
    events = follower.catch_up(1)
    assert (events is not None) == (num_messages <= 2)


def test_pages_of_two_snapshots_do_not_make_one() -> None:
    stored = [Stored(Tier.DRAM, NAMES[0])]
    pages = [
        KvSnapshotPage(sequence=3, stored=stored, next_page=5),
        KvSnapshotPage(sequence=4, stored=stored),
    ]
    reader = SnapshotReader()
    assert [list(reader.read(page)) for page in pages] == [stored, []]
    assert not reader.is_whole
    assert reader.next_page is None


def test_pages_that_are_not_kept_any_more_make_none() -> None:
    reader = SnapshotReader()
    assert list(reader.read(TOO_LATE)) == []
    assert not reader.is_whole
    assert reader.next_page is None


def catch_up(publisher: Publisher, follower: Follower, view: KvView) -> list[KvEvent] | None:
    """As `KvSubscriber` does, from a publisher that tells of a change with every page."""
    reader = SnapshotReader()
    page = publisher.pages.begin(publisher.holdings(), publisher.log.sequence, view.max_names)
    while True:
        for stored in reader.read(page):
            view.fill("draft", stored)
        publisher.log.stored(Tier.DRAM, [NAMES[0]])
        assert follower.hear(publisher.message()) == []
        if reader.next_page is None:
            return follower.catch_up(reader.sequence or 0)
        page = publisher.pages.turn(reader.next_page)


def test_a_big_store_that_never_rests_is_caught_up_with_by_a_view_that_can_hold_little_of_it() -> None:
    publisher, follower = Publisher(), Follower(max_kept_names=6)
    publisher.held = {(tier, name): None for tier in (Tier.DRAM, Tier.DISK) for name in NAMES}
    publisher.message()
    assert catch_up(publisher, follower, KvView(1000)) is None
    view = KvView(2)
    assert catch_up(publisher, follower, view) == [Stored(Tier.DRAM, NAMES[0])] * 2
    assert [view.tiers_of("draft", name) for name in NAMES[:3]] == [{Tier.DRAM, Tier.DISK}] * 2 + [set()]
