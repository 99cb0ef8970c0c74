from dataclasses import dataclass

import pytest

from libs.cost.prefill import PrefillCost, prefill_seconds
from libs.worker.prefill.waiting_work import WaitingWork

COST = PrefillCost(step_seconds=0.01, token_seconds=0.001, pair_seconds=1e-6)


@dataclass
class Waiting:
    num_tokens: int
    num_held: int = 0

    def num_new_tokens(self, block_size: int) -> int:
        return self.num_tokens - self.num_held * block_size


def work_of(*prompts: Waiting) -> WaitingWork:
    return WaitingWork(prompts, 4)  # type: ignore[arg-type]  # what is read of prompts is here


def test_one_prompt_keeps_the_engine_busy_for_what_it_takes_to_compute() -> None:
    work = work_of(Waiting(100))
    assert work.num_tokens == 100
    assert work.seconds(COST, 32) == pytest.approx(prefill_seconds(COST, 100, 0, max_step_tokens=32))


def test_what_a_store_holds_is_context_and_not_work() -> None:
    work = work_of(Waiting(100, num_held=20))
    assert work.num_tokens == 20
    assert work.seconds(COST, 32) == pytest.approx(prefill_seconds(COST, 20, 80, max_step_tokens=32))


def test_prompts_share_steps() -> None:
    work = work_of(Waiting(10), Waiting(12))
    parts = sum(prefill_seconds(COST, n, 0) for n in (10, 12))
    assert work.seconds(COST, 32) == pytest.approx(parts - COST.step_seconds)
    assert work_of().seconds(COST, 32) == 0
