"""When blocks are written to disk, and how fast blocks are sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.kv.write_policy import (
    HITS_WORTH_A_WRITE,
    WritePolicy,
    is_written_at_the_end,
    is_written_when_hit,
    is_written_when_put,
    num_blocks_to_flush,
)
from services.kv_store.peer import TokenBucket

POLICIES: tuple[WritePolicy, ...] = ("write_through", "write_back", "selective")


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_has_one_time_to_write(policy: WritePolicy) -> None:
    flushes = num_blocks_to_flush(policy, num_used_bytes=100, budget_bytes=100, block_bytes=1) > 0
    times = (is_written_when_put(policy), is_written_when_hit(policy, HITS_WORTH_A_WRITE), flushes)
    assert sum(times) == 1
    assert is_written_at_the_end(policy) == flushes
    assert not is_written_when_hit(policy, HITS_WORTH_A_WRITE - 1)


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 50))
def test_write_back_has_as_much_written_as_is_not_free(used: int, budget: int, block: int) -> None:
    used = min(used, budget)
    num = num_blocks_to_flush("write_back", num_used_bytes=used, budget_bytes=budget, block_bytes=block)
    if block:
        assert budget - used + num * block >= int(budget * 0.25)
        assert (num - 1) * block < int(budget * 0.25) or num == 0
    else:
        assert num == 0


@given(
    rate=st.floats(1, 1e9),
    takes=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10**6)), min_size=1, max_size=20),
)
def test_what_is_sent_never_passes_the_rate(rate: float, takes: list[tuple[float, int]]) -> None:
    bucket, now, num_bytes = TokenBucket(rate), 0.0, 0
    for pause, size in takes:
        now += pause
        due = bucket.take(size, now)
        num_bytes += size
        assert due >= now + size / rate * (1 - 1e-6)
        assert due >= num_bytes / rate * (1 - 1e-6)
        assert due <= now + num_bytes / rate * (1 + 1e-6)


def test_without_a_rate_nothing_waits() -> None:
    bucket = TokenBucket(0.0)
    assert [bucket.take(10**12, now) for now in (1.0, 1.0)] == [1.0, 1.0]
