"""What follows on trouble: every history ends, and the reasons are kept apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.generation import Refused
from libs.request.outcome import RETRYABLE, FailureReason, RefusalReason
from services.gateway.generation.readmission import (
    ROUTER,
    Again,
    History,
    Limits,
    RefusedBy,
    Trouble,
    Unreachable,
    next_step,
)
from services.gateway.generation.sequence import Failed, Interruption

workers = st.sampled_from(["a", "b", "c"])
refusals = st.builds(Refused, reason=st.sampled_from(RefusalReason))
troubles: st.SearchStrategy[Trouble] = st.one_of(
    st.builds(RefusedBy, who=st.just(ROUTER) | workers, answer=refusals),
    st.builds(Unreachable, who=st.just(ROUTER) | workers, detail=st.just("")),
    st.builds(Interruption, reason=st.sampled_from(FailureReason), detail=st.just(""), lost=workers),
)


@given(data=st.data(), limits=st.builds(Limits, replay=st.booleans(), max_attempts=st.integers(1, 5)))
def test_every_history_of_troubles_ends(data: st.DataObject, limits: Limits) -> None:
    history = History()
    seconds = 0.0
    for _ in range(limits.max_refusals + 200):
        history.num_begun += data.draw(st.integers(0, 1))
        step = next_step(data.draw(troubles), history, limits, seconds)
        if not isinstance(step, Again):
            return
        seconds += step.wait_seconds
        most = limits.router_patience_seconds + limits.max_refusals * (2.0 + limits.replay_patience_seconds)
        assert seconds <= most + 3.0
    raise AssertionError("it went on for ever")


@given(reason=st.sampled_from(FailureReason), num_begun=st.integers(0, 6), replay=st.booleans())
def test_a_begun_sequence_is_replayed_only_when_retryable_allowed_and_not_too_often(
    reason: FailureReason, num_begun: int, replay: bool
) -> None:
    limits = Limits(replay=replay, max_attempts=3)
    step = next_step(Interruption(reason, "x", lost="w"), History(num_begun=num_begun), limits, 0.0)
    may = replay and reason in RETRYABLE and num_begun < 3
    assert isinstance(step, Again) is may
    if not may:
        assert isinstance(step, Failed)
        assert step.reason is reason


def test_a_lost_worker_is_never_chosen_again() -> None:
    history = History()
    next_step(Interruption(FailureReason.PEER_LOST, "", lost="w"), history, Limits(), 0.0)
    next_step(Unreachable("v", ""), history, Limits(), 0.0)
    assert history.exclude == ("v", "w")


@pytest.mark.parametrize("reason", [RefusalReason.OVERLOADED, RefusalReason.DRAINING])
def test_a_full_worker_is_avoided_until_nobody_else_is_left(reason: RefusalReason) -> None:
    history = History()
    assert next_step(RefusedBy("w", Refused(reason=reason)), history, Limits(), 0.0) == Again()
    assert history.exclude == ("w",)
    nobody = RefusedBy(ROUTER, Refused(reason=RefusalReason.NO_WORKERS, retry_after_seconds=0.5))
    assert next_step(nobody, history, Limits(), 0.0) == Again(0.5)
    assert history.exclude == ()


def test_a_router_that_leaves_is_asked_no_more_but_another_may_answer() -> None:
    leaving = RefusedBy(ROUTER, Refused(reason=RefusalReason.DRAINING, retry_after_seconds=0.5))
    history, limits = History(), Limits(max_refusals=2)
    assert next_step(leaving, history, limits, 0.0) == Again(0.5)
    assert isinstance(next_step(leaving, history, limits, 0.0), Refused)


@pytest.mark.parametrize("reason", sorted(set(RefusalReason) - {RefusalReason.DRAINING}, key=str))
def test_what_the_router_refuses_is_told_as_it_is(reason: RefusalReason) -> None:
    refused = Refused(reason=reason, detail="why")
    assert next_step(RefusedBy(ROUTER, refused), History(), Limits(), 0.0) == refused


def test_a_mesh_that_stays_full_is_told_as_overloaded() -> None:
    history, limits = History(), Limits(max_refusals=3)
    full = RefusedBy("w", Refused(reason=RefusalReason.OVERLOADED))
    steps = [next_step(full, history, limits, 0.0) for _ in range(3)]
    assert steps[:2] == [Again(), Again()]
    assert isinstance(steps[2], Refused)
    assert steps[2].reason is RefusalReason.OVERLOADED


def test_a_silent_router_is_waited_for_and_then_given_up() -> None:
    history, limits = History(), Limits(router_patience_seconds=1.0)
    waited = 0.0
    while isinstance(step := next_step(Unreachable(ROUTER, "silence"), history, limits, 0.0), Again):
        waited += step.wait_seconds
    assert waited == 1.0
    assert isinstance(step, Refused)
    assert step.reason is RefusalReason.NO_WORKERS


def test_a_sequence_whose_only_worker_was_lost_waits_for_its_successor() -> None:
    history, limits = History(num_begun=1), Limits(replay_patience_seconds=10.0)
    nobody = RefusedBy(ROUTER, Refused(reason=RefusalReason.NO_WORKERS, retry_after_seconds=5.0))
    assert next_step(Interruption(FailureReason.PEER_LOST, "", lost="w"), history, limits, 100.0) == Again()
    assert next_step(nobody, history, limits, 109.0) == Again(2.0)
    assert next_step(nobody, history, limits, 110.0) == nobody.answer
