"""Who cannot take part in a move, who did not answer, and how each is told apart from who is unknown."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from coordinator_scene import coordinator_scene

from libs.bus.errors import (
    BusError,
    HandlerFailed,
    MessageTooLarge,
    NoResponders,
    NotConnected,
    Overloaded,
    RequestTimedOut,
    Undecodable,
)
from libs.bus.messages.migration import CancelMove, DenialReason, MoveAccepted, MoveDenied
from libs.bus.messages.presence import ServiceState
from services.migration_coordinator.denials import denial_of, may_have_been_done

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def accepted(answer: MoveAccepted | MoveDenied) -> str:
    assert isinstance(answer, MoveAccepted), answer
    return answer.move_id


def denied(answer: MoveAccepted | MoveDenied) -> MoveDenied:
    assert isinstance(answer, MoveDenied), answer
    return answer


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (ServiceState.DRAINING, DenialReason.DRAINING, "is about to end"),
        (ServiceState.STARTING, DenialReason.NOT_READY, "is not ready yet (loading)"),
    ],
)
def test_a_worker_that_drains_or_starts_is_not_one_that_nobody_knows(
    run_virtually: Run, state: ServiceState, reason: DenialReason, words: str
) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            detail = "loading" if state is ServiceState.STARTING else ""
            other = await scene.worker("other", state=state, detail=detail)
            home, _, _ = await scene.pair()
            for answer in (await scene.plan("other", "decode-1"), await scene.plan("decode-0", "other")):
                no = denied(answer)
                assert (no.reason, no.epoch) == (reason, 0)
                assert f"other {words}" in no.detail
            assert not home.started
            assert not other.started

    run_virtually(scenario())


def test_a_module_comes_home_from_a_worker_that_drains(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, host, _ = await scene.pair()
            away = accepted(await scene.plan("decode-0", "decode-1"))
            await home.end(away)
            host.facts["state"] = ServiceState.DRAINING
            await host.tell()
            accepted(await scene.plan("decode-0", returned_move_id=away))

    run_virtually(scenario())


def test_of_two_workers_with_one_name_the_order_is_for_the_one_that_is_ready(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, _ = await scene.pair()
            late = await scene.worker("late", state=ServiceState.DRAINING)
            late.facts["name"] = "decode-0"
            await late.tell()
            accepted(await scene.plan("decode-0", "decode-1"))
            assert len(home.started) == 1
            assert denied(await scene.plan("late-i", "decode-1")).reason is DenialReason.DRAINING

    run_virtually(scenario())


def test_a_home_that_has_not_told_its_placement_is_not_ready_yet(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            _, host, _ = await scene.pair()
            host.facts["incarnation"] = "young"  # another presence; the placement is told under its own
            await host.tell()
            no = denied(await scene.plan("young", "decode-0"))
            assert no.reason is DenialReason.NOT_READY
            assert "has not told its placement" in no.detail

    run_virtually(scenario())


def test_cancelling_says_who_is_not_there_and_who_does_not_answer(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, _ = await scene.pair()
            cancel = CancelMove(move_id=accepted(await scene.plan("decode-0", "decode-1")))
            home.hangs = True
            silent = await scene.ask(cancel)
            assert silent.reason is DenialReason.NO_ANSWER
            assert "the worker decode-0 has not answered in time" in silent.detail
            home.hangs, home.breaks = False, True
            broken = await scene.ask(cancel)
            assert broken.reason is DenialReason.FAILED
            await home.kill()
            away = await scene.ask(cancel)
            assert away.reason is DenialReason.UNREACHABLE
            assert "decode-0" in away.detail
            unknown = await scene.ask(CancelMove(move_id="never"))
            assert unknown.reason is DenialReason.NOT_FOUND

    run_virtually(scenario())


def test_a_home_that_leaves_while_it_is_asked_is_still_named(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, _ = await scene.pair()
            cancel = CancelMove(move_id=accepted(await scene.plan("decode-0", "decode-1")))
            home.hangs = True
            assert home.task is not None
            home.task.cancel()  # no heartbeat reaches anybody from now on
            silent = await scene.ask(cancel)
            assert silent.reason is DenialReason.NO_ANSWER
            assert "the worker decode-0 has not" in silent.detail
            over = await scene.ask(cancel)
            assert (over.reason, over.detail.endswith("is over: failed")) == (DenialReason.INVALID, True)

    run_virtually(scenario())


def test_a_known_move_that_its_home_never_began_is_no_unknown_one(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, _ = await scene.pair()
            home.hangs = True
            move_id = accepted(await scene.plan("decode-0", "decode-1"))  # it may begin still
            home.hangs = False
            no = denied(await scene.ask(CancelMove(move_id=move_id)))
            assert no.reason is DenialReason.INVALID
            assert move_id in no.detail

    run_virtually(scenario())


def test_an_order_that_nobody_takes_is_denied_and_not_remembered(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, _ = await scene.pair()
            home.breaks = True
            assert denied(await scene.plan("decode-0", "decode-1")).reason is DenialReason.FAILED
            await home.bus.close()
            assert denied(await scene.plan("decode-0", "decode-1")).reason is DenialReason.UNREACHABLE
            assert await scene.move("") is None

    run_virtually(scenario())


@pytest.mark.parametrize(
    ("error", "reason", "may_be_done"),
    [
        (NoResponders("x"), DenialReason.UNREACHABLE, False),
        (NotConnected("the broker is away"), DenialReason.UNREACHABLE, True),
        (Overloaded("full"), DenialReason.UNREACHABLE, False),
        (RequestTimedOut("x"), DenialReason.NO_ANSWER, True),
        (HandlerFailed("x"), DenialReason.FAILED, False),
        (Undecodable("versions differ"), DenialReason.NO_ANSWER, True),
        (MessageTooLarge("s", 2, 1), DenialReason.FAILED, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BusError) else None,
)
def test_no_failure_of_the_bus_is_told_as_something_unknown(
    error: BusError, reason: DenialReason, may_be_done: bool
) -> None:
    no = denial_of(error, "decode-0")
    assert no.reason is reason
    assert "decode-0" in no.detail
    assert may_have_been_done(error) is may_be_done
