"""What stores say of a prompt, put together."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.store import PrefixHeld
from libs.kv.runs import RUN_BLOCKS, runs_of
from libs.worker.stores.circuit_breaker import LONGEST_PAUSE_SECONDS, CircuitBreaker
from libs.worker.stores.parallel_fetch import until_useless
from libs.worker.stores.prefix_lookup import PrefixLookup, RunLookup, run_lookups
from libs.worker.stores.store_link import FetchResult


def found_of(data: st.DataObject, num_blocks: int) -> PrefixLookup:
    runs: list[RunLookup] = []
    for run in runs_of(num_blocks):
        held = data.draw(st.none() | st.integers(0, len(run)) | st.just(len(run)))
        in_memory = data.draw(st.integers(0, held or 0))
        runs.append(RunLookup(run, data.draw(st.sampled_from("abc")), held, in_memory))
    return PrefixLookup(tuple(runs))


@given(st.data(), st.integers(0, 5 * RUN_BLOCKS))
def test_a_prefix_is_held_as_far_as_no_block_is_missing(data: st.DataObject, num_blocks: int) -> None:
    found = found_of(data, num_blocks)
    held = {n for run in found.runs for n in run.blocks[: run.num_held or 0]}
    assert found.num_held == next((n for n in range(num_blocks) if n not in held), num_blocks)
    assert found.num_in_memory <= found.num_held
    on_disk = found.num_on_disk(range(found.num_held))
    assert on_disk == found.num_held - found.num_in_memory


@given(st.data(), st.integers(1, 5 * RUN_BLOCKS))
def test_only_what_a_store_said_it_lacks_is_missing(data: st.DataObject, num_blocks: int) -> None:
    found = found_of(data, num_blocks)
    missing = {n for part in found.missing for n in part}
    assert missing == {
        n for run in found.runs if run.num_held is not None for n in run.blocks[run.num_held :]
    }


@given(st.data(), st.integers(1, 5 * RUN_BLOCKS))
def test_blocks_are_sought_where_their_run_lies_each_once(data: st.DataObject, num_blocks: int) -> None:
    found = found_of(data, num_blocks)
    first = data.draw(st.integers(0, num_blocks - 1))
    wanted = range(first, data.draw(st.integers(first, num_blocks)))
    parts = found.by_store(wanted)
    assert sorted(n for ranges in parts.values() for part in ranges for n in part) == list(wanted)
    store_at = {n: run.store for run in found.runs for n in run.blocks}
    assert all(store_at[n] == store for store, ranges in parts.items() for part in ranges for n in part)


def test_an_answer_that_makes_no_sense_is_no_answer() -> None:
    runs = [range(32), range(64, 70)]
    for held, in_memory in (((32,), (32,)), ((33, 0), (0, 0)), ((-1, 0), (0, 0)), ((3, 6), (4, 0))):
        answer = PrefixHeld(num_blocks=held, num_in_memory=in_memory)
        first = run_lookups("a", runs, answer)[0]
        assert (first.num_held, list(first.missing)) == (None, [])
    good = run_lookups("a", runs, PrefixHeld(num_blocks=(32, 2), num_in_memory=(32, 1)))
    assert [list(run.missing) for run in good] == [[], [66, 67, 68, 69]]
    assert not PrefixLookup(tuple(run_lookups("a", runs, None))).is_answered


def test_a_store_is_left_alone_longer_after_each_failure_and_trusted_after_one_answer() -> None:
    trust, now, pauses = CircuitBreaker(), 0.0, list[float]()
    for _ in range(8):
        trust.failed(now)
        trust.failed(now)  # several that waited at once say nothing new
        began = now
        while not trust.is_due(now):
            now += 0.01
        pauses.append(round(now - began, 1))
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.6
    assert pauses[-1] <= LONGEST_PAUSE_SECONDS + 0.02
    trust.failed(now)
    trust.succeeded()
    assert trust.is_due(now)


async def test_what_lies_behind_a_failed_part_is_not_waited_for_and_what_lies_before_is() -> None:
    loop = asyncio.get_running_loop()
    before, failing, behind = (loop.create_future() for _ in range(3))
    waiting = asyncio.create_task(until_useless({failing: 32, before: 0, behind: 64}))
    failing.set_result((FetchResult.MISSED, 0.1))
    await asyncio.wait({behind}, timeout=1)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    before.set_result((FetchResult.HIT, 0.2))
    assert await waiting == {32: (FetchResult.MISSED, 0.1), 0: (FetchResult.HIT, 0.2)}
    assert behind.cancelled()
