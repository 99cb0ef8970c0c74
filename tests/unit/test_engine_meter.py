import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch

from libs.engine.forward.runner import HandOverBudget
from libs.engine.mailbox import Mailbox
from libs.engine.meter import Meter
from libs.engine.outputs import LayerOutput
from libs.engine.settings import EngineSettings, pool_blocks
from libs.engine.thread_loop import ThreadLoop


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_busy_share_and_rate_cover_the_last_second_only() -> None:
    clock = Clock()
    meter = Meter(clock)
    for _ in range(4):
        meter.begin()
        clock.now += 0.125
        meter.end(10)
        clock.now += 0.125
    assert meter.rates() == (0.5, 40.0)
    clock.now += 0.5
    assert meter.rates() == (0.25, 20.0)
    clock.now += 10
    assert meter.rates() == (0.0, 0.0)


def test_a_step_that_still_runs_is_busy_time() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin()
    clock.now += 0.25
    assert meter.rates() == (0.25, 0.0)
    clock.now += 5
    assert meter.rates() == (1.0, 0.0)
    meter.end(50)
    assert meter.rates()[0] == 1.0
    assert meter.rates()[1] == pytest.approx(50 / 5.25)


def test_looking_for_work_in_vain_is_not_busy() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin()
    clock.now += 0.5
    meter.end(None)
    assert meter.rates() == (0.0, 0.0)


@pytest.fixture
def mailbox() -> Iterator[Mailbox[int]]:
    loop = ThreadLoop()
    yield Mailbox[int](loop)
    loop.close()


def test_a_mailbox_keeps_order_and_wakes_its_taker(mailbox: Mailbox[int]) -> None:
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.extend(mailbox.take_all(wait=True)))
    waiting.start()
    mailbox.put(1)
    waiting.join(timeout=10)
    assert taken == [1]
    assert mailbox.take_all(wait=False) == []
    assert mailbox.take_all(wait=True, timeout_seconds=0.001) == []


def test_only_the_first_wanted_items_are_taken_ahead(mailbox: Mailbox[int]) -> None:
    for number in (2, 4, 5, 6):
        mailbox.put(number)
    assert mailbox.take(lambda number: number % 2 == 0) == [2, 4, 6]
    assert mailbox.take_all(wait=False) == [5]


def test_settings_are_checked_and_size_the_pool() -> None:
    assert pool_blocks(EngineSettings(max_model_len=8, num_blocks=3), block_bytes=1000) == 3
    assert pool_blocks(EngineSettings(max_model_len=8, kv_memory_bytes=2999), block_bytes=1000) == 2
    with pytest.raises(ValueError, match="below one block"):
        pool_blocks(EngineSettings(max_model_len=8, kv_memory_bytes=999), block_bytes=1000)
    fine = EngineSettings(max_model_len=1)
    for name in ("max_model_len", "block_size", "num_blocks", "max_num_seqs", "num_threads"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            dataclasses.replace(fine, **{name: 0})  # type: ignore[arg-type]  # any of the sizes
    assert EngineSettings(max_model_len=8, max_num_seqs=9, max_num_batched_tokens=4).num_step_seqs == 4


def test_the_hand_over_budget_lets_one_block_leave_when_nothing_is_out() -> None:
    output = LayerOutput("r", 0, 0, torch.zeros(64, dtype=torch.uint8))
    for limit_bytes, num_before, num_after in ((10, 1, 0), (100, 1, 0), (64 * 3, 3, 2)):
        budget = HandOverBudget(limit_bytes, block_bytes=64)
        assert budget.num_blocks == num_before
        budget.take(output)
        assert budget.num_blocks == num_after
        budget.release(output)
        budget.release(output)
        assert (budget.out_bytes, budget.num_blocks) == (0, num_before)
