"""One simulated store: what it holds, where, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.fetch import FetchCost
from libs.kv.block_tree import DISK, MEMORY
from libs.kv.write_policy import WritePolicy
from libs.simulator.event_loop import Due, run_events
from libs.simulator.shape import StoreShape
from libs.simulator.store import SimulatedStore

FETCH = FetchCost(latency_seconds=0.0, bytes_per_second=1000.0, disk_bytes_per_second=100.0)


def store_of(num_memory: int, num_disk: int, write_policy: WritePolicy = "write_through") -> SimulatedStore:
    shape = StoreShape(
        num_memory_blocks=num_memory, num_disk_blocks=num_disk, fetch=FETCH, write_policy=write_policy
    )
    return SimulatedStore("store-0", shape, block_bytes=10)


def chain(letter: str, length: int) -> list[bytes]:
    return [f"{letter}{number}".encode().ljust(16, b".") for number in range(length)]


def held(store: SimulatedStore, names: list[bytes]) -> list[bool]:
    """For each of the first blocks that are held, whether it is in memory."""
    return store.find(names).is_in_memory


def read(store: SimulatedStore, names: list[bytes], now: float) -> list[Due]:
    nodes = store.find(names).nodes
    dues = store.use(nodes, now) + store.begin_reading(nodes, now)
    store.end_reading(nodes)
    return dues


def test_a_store_without_a_disk_forgets_what_was_used_longest_ago():
    store = store_of(4, 0)
    for now, letter in enumerate("abc"):
        store.put(chain(letter, 2), b"", float(now))
    assert held(store, chain("a", 2)) == []
    assert held(store, chain("b", 2)) == [True, True]
    assert held(store, chain("c", 2)) == [True, True]


def test_what_is_written_through_is_found_on_disk_once_memory_needs_its_room():
    store = store_of(4, 100)
    for now, letter in enumerate("abc"):
        run_events(store.put(chain(letter, 2), b"", float(now)))
    assert held(store, chain("a", 2)) == [False, False]
    assert held(store, chain("c", 2)) == [True, True]


def test_what_is_written_back_goes_to_disk_before_memory_needs_its_place():
    store = store_of(8, 100, "write_back")
    for now, letter in enumerate("abc"):
        store.put(chain(letter, 2), b"", float(now))
    assert store.tree.num_in(DISK) == 0
    for now, letter in enumerate("def"):
        store.put(chain(letter, 2), b"", 3.0 + now)
    assert held(store, chain("a", 2)) == [False, False]
    assert 2 < store.tree.num_in(DISK) < 12


def test_a_selective_store_writes_what_was_hit_twice():
    store = store_of(4, 100, "selective")
    for now, letter in enumerate("ab"):
        store.put(chain(letter, 2), b"", float(now))
    for now in (2.0, 3.0):
        read(store, chain("a", 2), now)
    store.put(chain("c", 2), b"", 4.0)
    store.put(chain("d", 2), b"", 5.0)
    assert held(store, chain("a", 2)) == [False, False]
    assert held(store, chain("b", 2)) == []


def test_a_hit_on_disk_comes_into_memory():
    store = store_of(4, 100)
    for now, letter in enumerate("abc"):
        run_events(store.put(chain(letter, 2), b"", float(now)))
    read(store, chain("a", 2), 3.0)
    assert held(store, chain("a", 2)) == [True, True]
    assert store.tree.num_in(MEMORY) == 4


def test_what_is_being_read_stays():
    store = store_of(4, 0)
    store.put(chain("a", 2), b"", 0.0)
    nodes = store.find(chain("a", 2)).nodes
    store.begin_reading(nodes, 1.0)
    for now, letter in enumerate("bcd"):
        store.put(chain(letter, 2), b"", 2.0 + now)
    assert held(store, chain("a", 2)) == [True, True]
    store.end_reading(nodes)
    for now, letter in enumerate("ef"):
        store.put(chain(letter, 2), b"", 6.0 + now)
    assert held(store, chain("a", 2)) == []


def test_a_run_larger_than_memory_is_held_as_far_as_it_goes():
    store = store_of(3, 0)
    store.put(chain("a", 5), b"", 0.0)
    assert held(store, chain("a", 5)) == [True] * 3


def test_what_is_unused_for_longer_than_its_ttl_goes_from_the_ends_of_chains():
    a, b = chain("a", 3), chain("b", 3)
    shape = StoreShape(
        num_memory_blocks=100,
        num_disk_blocks=100,
        fetch=FETCH,
        ttl_seconds=10.0,
        group_ttl_seconds={b[0]: 100.0},
    )
    store = SimulatedStore("store-0", shape, block_bytes=10)
    for names in (a, b):
        run_events(store.put(names, b"", 0.0))
    read(store, a[:1], 8.0)
    store.expire(9.0)
    assert (len(held(store, a)), len(held(store, b))) == (3, 3)
    store.expire(15.0)
    assert (len(held(store, a)), len(held(store, b))) == (1, 3)
    store.expire(50.0)
    assert (len(held(store, a)), len(held(store, b))) == (0, 3)
    store.expire(150.0)
    assert len(store.tree) == 0


def test_what_is_being_read_does_not_expire():
    shape = StoreShape(num_memory_blocks=10, fetch=FETCH, ttl_seconds=1.0)
    store = SimulatedStore("store-0", shape, block_bytes=10)
    store.put(chain("a", 2), b"", 0.0)
    nodes = store.find(chain("a", 2)).nodes
    store.begin_reading(nodes, 0.5)
    store.expire(9.0)
    assert len(store.tree) == 2
    store.end_reading(nodes)
    store.expire(19.0)
    assert len(store.tree) == 0


def test_writing_takes_its_share_of_the_disk():
    store = store_of(100, 100)
    ends: list[float] = []

    def begin(now: float) -> list[Due]:
        read_dues = store.disk.begin(100, lambda end: ends.append(end) or [], now)
        return read_dues + store.put(chain("a", 10), b"", now)

    run_events([Due(0.0, begin)])
    assert ends == [pytest.approx(2.0)]  # alone it would take 100 bytes / 100 bytes per second


STEPS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 6), st.booleans()), min_size=1, max_size=60
)
POLICIES = st.sampled_from(["write_through", "write_back", "selective"])


@given(STEPS, st.integers(1, 12), st.integers(0, 12), POLICIES)
def test_no_tier_overflows_and_no_child_outlives_its_parent(steps, num_memory, num_disk, write_policy):
    store = store_of(num_memory, num_disk, write_policy)
    waiting: list[Due] = []
    for now, (letter, length, is_read) in enumerate(steps):
        if is_read:
            waiting += read(store, chain(letter, length), float(now))
        else:
            waiting += store.put(chain(letter, length), b"", float(now))
        assert store.tree.num_in(MEMORY) <= num_memory
        assert store.tree.num_in(DISK) <= num_disk
        num_found = sum(len(held(store, chain(letter, 6))) for letter in "abcdefgh")
        assert num_found == len(store.tree)  # all that is held can be found from the start of its chain
