"""Moves by hand and by the loop: orders, denials, history, cancelling, explained rounds."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from coordinator_scene import ONE_HEAD, ToldWorker, coordinator_scene, module_of

from libs.bus.messages.migration import (
    CancelMove,
    DenialReason,
    ExplainRounds,
    ListMoves,
    MoveAccepted,
    MoveDenied,
    MoveTold,
)
from libs.bus.messages.presence import ServiceKind
from libs.placement.module import heads_of, whole_layers
from libs.placement.phases import MovePhase
from libs.placement.placement import Placed

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def test_a_move_by_hand_goes_to_the_home_and_its_end_is_remembered(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, host, _ = await scene.pair()
            accepted = await scene.plan("decode-0", "decode-1", expected_epoch=0)
            assert isinstance(accepted, MoveAccepted)
            (start,) = home.started
            assert (start.module, start.host, start.expected_epoch) == (ONE_HEAD, host.incarnation, 0)
            assert start.move_id == accepted.move_id
            await home.end(accepted.move_id)
            back = await scene.plan("decode-0", returned_move_id=accepted.move_id, expected_epoch=1)
            assert isinstance(back, MoveAccepted)
            assert home.started[-1].module is None
            await home.end(back.move_id)
            moves = (await scene.ask(ListMoves())).moves
            assert [one.move_id for one in moves] == [back.move_id, accepted.move_id]
            assert [one.phase for one in moves] == [MovePhase.DONE, MovePhase.DONE]
            assert home.placement.epoch == 2

    run_virtually(scenario())


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"instance": "nobody", "host": "decode-1"}, DenialReason.INSTANCE_NOT_FOUND),
        ({"instance": "decode-0", "host": "nobody"}, DenialReason.WORKER_NOT_FOUND),
        ({"host": "decode-1", "module": whole_layers(0, 1)}, DenialReason.INVALID),
        ({"returned_move_id": "never"}, DenialReason.NOT_FOUND),
        ({"instance": "decode-0", "host": "decode-0"}, DenialReason.INVALID),
        ({"instance": "decode-0", "host": "decode-1", "expected_epoch": 7}, DenialReason.STALE_EPOCH),
        ({"instance": "decode-0", "host": "decode-1", "with_weights": True}, DenialReason.INVALID),
        ({"instance": "decode-0", "host": "decode-1", "module": whole_layers(0, 30)}, DenialReason.INVALID),
        ({"instance": "decode-0", "host": "decode-1", "module": heads_of(0, 99, (0,))}, DenialReason.INVALID),
        ({"instance": "decode-0", "host": "other-model"}, DenialReason.INVALID),
        ({"instance": "decode-0", "host": "hosts-nothing"}, DenialReason.INVALID),
        ({"instance": "decode-0"}, DenialReason.INVALID),
        ({"instance": "decode-0", "returned_move_id": "never"}, DenialReason.NOT_FOUND),
        ({"instance": "decode-0", "returned_move_id": "x", "host": "decode-1"}, DenialReason.INVALID),
    ],
)
def test_what_cannot_begin_is_denied_before_anybody_is_asked(
    run_virtually: Run, plan: dict[str, Any], reason: DenialReason
) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            await scene.worker("other-model", model_fingerprint="another")
            await scene.worker("hosts-nothing", hosting_address="")
            home, _, _ = await scene.pair()
            denied = await scene.plan(**plan)
            assert isinstance(denied, MoveDenied)
            assert denied.reason is reason
            assert denied.detail
            assert not home.started
            assert (await scene.ask(ListMoves())).moves == ()

    run_virtually(scenario())


def test_a_module_comes_home_to_whose_it_is_by_its_move_alone(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, other, _ = await scene.pair()
            accepted = await scene.plan("decode-0", "decode-1")
            early = await scene.plan(returned_move_id=accepted.move_id)
            assert early.reason is DenialReason.BUSY, "it has not left yet"
            assert accepted.move_id in early.detail
            await home.end(accepted.move_id)
            back = await scene.plan(returned_move_id=accepted.move_id)
            assert isinstance(back, MoveAccepted)
            assert home.started[-1].returned_move_id == accepted.move_id
            assert not other.started

    run_virtually(scenario())


def test_of_what_cannot_come_home_it_is_told_what_can_and_whose_it_is(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, other, _ = await scene.pair()
            at_home = await scene.plan(returned_move_id="m9")
            assert at_home.detail == "no module that move 'm9' brought away is away; every module is at home"
            ids: list[str] = []
            for one, host in ((home, "decode-1"), (other, "decode-0")):
                accepted = await scene.plan(one.name, host)
                await one.end(accepted.move_id)
                ids.append(accepted.move_id)
            unknown = await scene.plan(returned_move_id="m9")
            assert unknown.detail.endswith(
                f"what is away was brought there by {ids[0]} (of decode-0), {ids[1]} (of decode-1)"
            )
            mistaken = await scene.plan("decode-0", returned_move_id=ids[1])
            assert mistaken.reason is DenialReason.NOT_FOUND
            assert mistaken.detail == (
                f"decode-0: what move '{ids[1]}' brought away is decode-1's; name that instance, or none"
            )

    run_virtually(scenario())


def test_of_a_move_that_several_homes_name_the_instance_is_to_be_named(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            for one, host in zip(await scene.pair(), ("decode-1-i", "decode-0-i"), strict=False):
                assert isinstance(one, ToldWorker)
                one.placement = one.placement.with_module(Placed(move_id="m", module=ONE_HEAD, worker=host))
            await asyncio.sleep(1)
            denied = await scene.plan(returned_move_id="m")
            assert denied.reason is DenialReason.INVALID
            assert "decode-0, decode-1; name the instance" in denied.detail
            assert isinstance(await scene.plan("decode-1", returned_move_id="m"), MoveAccepted)

    run_virtually(scenario())


def test_one_move_at_a_time_and_the_homes_own_denial_is_passed_on(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, host, _ = await scene.pair(max_moves=1)
            host.denial = MoveDenied(reason=DenialReason.BUSY, detail="another move", epoch=0)
            assert await scene.plan("decode-1", "decode-0") == host.denial
            assert (await scene.ask(ListMoves())).moves == ()
            accepted = await scene.plan("decode-0", "decode-1")
            again = await scene.plan("decode-0", "decode-1", module=whole_layers(0, 1))
            other = await scene.plan("decode-1", "decode-0")
            assert [again.reason, other.reason] == [DenialReason.BUSY, DenialReason.BUSY]
            await home.end(accepted.move_id)
            host.denial = None
            assert isinstance(await scene.plan("decode-1", "decode-0"), MoveAccepted)

    run_virtually(scenario())


def test_an_order_without_an_answer_ends_when_the_home_does_not_tell_of_it(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, coordinator = await scene.pair()
            home.hangs = True
            accepted = await scene.plan("decode-0", "decode-1")
            assert isinstance(accepted, MoveAccepted)
            await scene.until(lambda: coordinator.gauge("kvmesh_coordinator_num_moves") == 0, 10)
            record = await scene.move(accepted.move_id)
            assert record is not None
            assert record.phase is MovePhase.FAILED
            assert "does not know it" in record.error

    run_virtually(scenario())


def test_a_home_that_dies_ends_its_move_in_the_history(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, coordinator = await scene.pair()
            accepted = await scene.plan("decode-0", "decode-1")
            await home.kill()
            await scene.until(lambda: coordinator.gauge("kvmesh_coordinator_num_moves") == 0, 10)
            record = await scene.move(accepted.move_id)
            assert record is not None
            assert record.error == "its home left the mesh"
            assert isinstance(await scene.plan("decode-0", "decode-1"), MoveDenied)

    run_virtually(scenario())


def test_a_long_history_is_told_as_far_back_as_an_answer_holds(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, coordinator = await scene.pair()
            accepted = await scene.plan("decode-0", "decode-1")
            await home.end(accepted.move_id)
            (done,) = home.moves.values()
            for number in range(190):
                long = msgspec.structs.replace(done, move_id=f"m{number}", error="x" * 5000)
                await home.bus.publish(MoveTold(move=long))
            await scene.until(lambda: coordinator.service._moves.get("m189") is not None)
            told = [one.move_id for one in (await scene.ask(ListMoves())).moves]
            assert told == [f"m{189 - at}" for at in range(len(told))]
            assert 50 < len(told) < 190
            oldest = await scene.move(accepted.move_id)
            assert oldest is not None

    run_virtually(scenario())


def test_cancelling_reaches_the_home_while_the_move_is_not_over(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, _ = await scene.pair()
            accepted = await scene.plan("decode-0", "decode-1")
            assert isinstance(await scene.ask(CancelMove(move_id=accepted.move_id)), MoveAccepted)
            assert home.abandoned == [accepted.move_id]
            over = await scene.ask(CancelMove(move_id=accepted.move_id))
            assert over.reason is DenialReason.INVALID
            unknown = await scene.ask(CancelMove(move_id="never"))
            assert unknown.reason is DenialReason.NOT_FOUND
            assert home.abandoned == [accepted.move_id]

    run_virtually(scenario())


def test_who_cancels_a_move_that_is_done_is_told_how_it_comes_home(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, _, _ = await scene.pair()
            away = await scene.plan("decode-0", "decode-1")
            await home.end(away.move_id)
            over = await scene.ask(CancelMove(move_id=away.move_id))
            assert f"kvmesh migrate --return {away.move_id}" in over.detail
            back = await scene.plan(returned_move_id=away.move_id)
            await home.end(back.move_id)
            assert (await scene.ask(CancelMove(move_id=back.move_id))).detail.endswith("is over: done")

    run_virtually(scenario())


def test_the_loop_moves_layers_of_a_busy_worker_and_explains_it(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            busy, idle, coordinator = await scene.pair(automatic=True)
            busy.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            await scene.until(lambda: bool(busy.started), 20)
            (start,) = busy.started
            assert start.host == idle.incarnation
            assert module_of(start).kind.value == "layers"
            assert start.move_id.startswith("auto-")
            rounds = (await scene.ask(ExplainRounds(num_rounds=200))).rounds
            told = next(one for one in rounds if one.move_id)
            assert told.move_id == start.move_id
            assert told.decision.endswith(start.reason.split(": ")[1])
            assert any(one.verdict == "taken" for one in told.candidates)
            assert {one.name for one in told.devices} == {"decode-0", "decode-1"}
            assert coordinator.gauge("kvmesh_utilization_gap") > 0.25
            assert coordinator.gauge("kvmesh_device_utilization", worker="decode-0", kind="compute") > 0.7
            await scene.until(
                lambda: coordinator.gauge("kvmesh_migration_decisions_total", verdict="moved") == 1
            )
            assert len(busy.started) == 1

    run_virtually(scenario())


def test_switched_off_the_loop_watches_and_moves_by_hand_still_work(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            busy, _, _ = await scene.pair(automatic=False)
            busy.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            await asyncio.sleep(20)
            assert not busy.started
            explained = await scene.ask(ExplainRounds(num_rounds=1))
            assert not explained.is_automatic
            assert "only watches" in explained.rounds[0].decision
            assert isinstance(await scene.plan("decode-0", "decode-1"), MoveAccepted)

    run_virtually(scenario())


def test_a_denied_move_of_the_loop_is_counted_and_not_asked_for_again_at_once(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            busy, _, coordinator = await scene.pair(automatic=True)
            busy.denial = MoveDenied(reason=DenialReason.BUSY, detail="another move", epoch=0)
            busy.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            await scene.until(lambda: bool(busy.started), 20)
            await asyncio.sleep(25)
            assert len(busy.started) == 1
            assert coordinator.gauge("kvmesh_migration_decisions_total", verdict="denied") == 1
            busy.denial = None
            await scene.until(lambda: len(busy.started) == 2, 20)
            await busy.end(busy.started[1].move_id, MovePhase.FAILED)
            await asyncio.sleep(25)
            assert len(busy.started) == 2, "nor after one that failed"

    run_virtually(scenario())


def test_where_roles_may_flip_an_idle_worker_is_asked_to(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            await scene.worker("prefill-0", ServiceKind.PREFILL_WORKER)
            await scene.worker("prefill-1", ServiceKind.PREFILL_WORKER)
            first, second, _ = await scene.pair(
                automatic=True, flips_roles=True, moves_layers=False, moves_heads=False
            )
            for worker in (first, second):
                worker.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            prefills = [scene.workers["prefill-0"], scene.workers["prefill-1"]]
            await scene.until(lambda: sum(one.num_flips for one in prefills) == 1, 20)
            await asyncio.sleep(20)
            assert sum(one.num_flips for one in prefills) == 1, "then all rest"

    run_virtually(scenario())


def test_the_series_of_a_worker_that_is_gone_goes_too(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            _, host, coordinator = await scene.pair()
            labels = {"worker": "decode-1", "kind": "total"}
            assert coordinator.registry.get_sample_value("kvmesh_device_utilization", labels) is not None
            await host.kill()
            await asyncio.sleep(6)
            assert coordinator.registry.get_sample_value("kvmesh_device_utilization", labels) is None

    run_virtually(scenario())
