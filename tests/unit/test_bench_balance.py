from typing import Any

import pytest

from tests.bench.balance import AIM, CROWDED, SKEWED, Outcome, crowded_figures, skewed_figures
from tests.bench.balance_load import Phase, Seen, moves_in

PHASE = Phase("short", prompt_tokens=100, output_tokens=4, seconds=10.0)


def record(*token_seconds: float, error: str = "", was_cancelled: bool = False) -> dict[str, Any]:
    return {
        "sent_seconds": 1.0,
        "token_seconds": list(token_seconds),
        "error": error,
        "was_cancelled": was_cancelled,
    }


def load(num_running: int) -> dict[str, Any]:
    return {"num_running": num_running}


def a_round(decision: str, *utilizations: float, move_id: str = "") -> dict[str, Any]:
    devices = [{"utilization": value, "compute": value / 2} for value in utilizations]
    return {"decision": decision, "devices": devices, "move_id": move_id}


def seen(phase: Phase, num_requests: int, *, peak: float = 0.8, num_running: int = 4) -> Seen:
    times = [2.0 + 0.1 * step for step in range(phase.output_tokens)]
    looks = [{f"{kind}-{i}": load(num_running) for kind in ("prefill", "decode") for i in (0, 1)}]
    return Seen(phase, [record(*times)] * num_requests, looks * 8, [a_round("stays", peak, 0.1)])


def test_what_the_end_cut_counts_as_far_as_it_came_and_is_no_failure() -> None:
    phase = Seen(
        PHASE,
        [record(1.5, 1.6, 2.0), record(3.0, was_cancelled=True), record(was_cancelled=True)],
    )
    assert phase.num_failed == 0
    assert phase.tokens_per_second == pytest.approx((2 * 100 + 4) / 10)
    assert phase.first_token_seconds == pytest.approx([0.5, 2.0])
    assert phase.gap_seconds == pytest.approx([0.1, 0.4])


def test_requests_that_end_with_an_error_are_failures() -> None:
    assert Seen(PHASE, [record(error="http_503"), record(1.5)]).num_failed == 1


def test_the_peak_is_the_busiest_device_of_each_round_on_average() -> None:
    phase = Seen(PHASE, rounds=[a_round("stays", 0.9, 0.1), a_round("stays"), a_round("stays", 0.2, 0.5)])
    assert phase.peak_utilization == pytest.approx(0.7)


def test_a_settled_phase_is_its_second_half() -> None:
    phase = Seen(PHASE, rounds=[a_round("stays", 0.9), a_round("stays", 0.3)])
    assert phase.settled.peak_utilization == pytest.approx(0.3)


def test_moves_are_told_and_rounds_that_stay_are_not() -> None:
    assert moves_in([a_round("stays"), a_round("layers 0-7", move_id="auto-1")]) == ["layers 0-7"]


def test_running_sequences_are_those_of_one_kind_in_the_second_half() -> None:
    looks = [{"decode-0": load(1), "decode-1": load(2), "prefill-0": load(50)}] * 3
    later = [{"decode-0": load(5), "decode-1": load(6), "prefill-0": load(50)}] * 3
    assert Seen(PHASE, loads=looks + later).mean_running("decode") == 11


def test_the_skewed_load_is_held_against_the_same_without_moves() -> None:
    off = Outcome([seen(phase, 20) for phase in SKEWED], seen(SKEWED[0], 5, peak=0.7), 2.0)
    on = Outcome([seen(phase, 30) for phase in SKEWED], seen(SKEWED[0], 5, peak=0.5), 2.0)
    figures = {figure.name: figure for figure in skewed_figures(off, on)}
    whole = figures["skewed load: tokens/s, coordinator on"]
    assert whole.ratio == pytest.approx(1.5)
    assert whole.met
    assert figures[f"{SKEWED[0].name} at 2.00/s: peak utilization"].met


def test_a_small_pool_is_judged_by_the_sequences_that_run_at_once() -> None:
    figures = crowded_figures(seen(CROWDED, 10, num_running=5), seen(CROWDED, 10, num_running=6))
    assert figures[0].reference == 10
    assert figures[0].at_least == pytest.approx(AIM * 10)
    assert not figures[0].met
