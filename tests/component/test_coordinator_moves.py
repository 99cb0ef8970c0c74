"""Moves of the loop: orders, denials, history, explained rounds."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator_scene import coordinator_scene, module_of

from libs.bus.messages.migration import DenialReason, ExplainRounds, MigrationDenied
from libs.bus.messages.presence import ServiceKind
from libs.placement.migration import MigrationPhase
from libs.placement.role import Role

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def test_an_order_without_an_answer_ends_when_the_owner_does_not_tell_of_it(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            busy, _, coordinator = await scene.pair(automatic=True)
            busy.hangs = True
            busy.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            await scene.until(lambda: bool(busy.started), 20)
            move_id = busy.started[0].move_id
            planned = scene.move(move_id)
            assert planned is not None
            assert (planned.phase, planned.instance_name) == (MigrationPhase.PLANNED, "decode-0")
            await scene.until(lambda: coordinator.gauge("kvmesh_coordinator_num_moves") == 0, 10)
            lost = scene.move(move_id)
            assert lost is not None
            assert lost.phase is MigrationPhase.FAILED
            assert "does not know it" in lost.error

    run_virtually(scenario())


def test_an_owner_that_dies_ends_its_move_in_the_history(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            owner, host, coordinator = await scene.pair()
            move_id = await scene.order_by_hand(owner, host)
            await scene.until(lambda: coordinator.gauge("kvmesh_coordinator_num_moves") == 1)
            await owner.kill()
            await scene.until(lambda: coordinator.gauge("kvmesh_coordinator_num_moves") == 0, 10)
            record = scene.move(move_id)
            assert record is not None
            assert record.error == "its home left the mesh"

    run_virtually(scenario())


def test_the_loop_waits_for_moves_by_hand(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            owner, host, _ = await scene.pair(automatic=True, max_moves=1)
            move_id = await scene.order_by_hand(owner, host)
            owner.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            await asyncio.sleep(20)
            assert len(owner.started) == 1
            explained = await scene.ask(ExplainRounds(num_rounds=1))
            assert explained.rounds[0].decision == "stays: 1 of 1 moves are under way"
            await owner.end(move_id, MigrationPhase.FAILED)
            await scene.until(lambda: len(owner.started) == 2, 20)

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


def test_switched_off_the_loop_only_watches(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            busy, _, _ = await scene.pair(automatic=False)
            busy.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            await asyncio.sleep(20)
            assert not busy.started
            explained = await scene.ask(ExplainRounds(num_rounds=1))
            assert not explained.is_automatic
            assert "only watches" in explained.rounds[0].decision

    run_virtually(scenario())


def test_a_denied_move_of_the_loop_is_counted_and_not_asked_for_again_at_once(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            busy, _, coordinator = await scene.pair(automatic=True)
            busy.denial = MigrationDenied(reason=DenialReason.BUSY, detail="another move", epoch=0)
            busy.load = {"busy_share": 0.25, "queued_seconds": 4.0}
            await scene.until(lambda: bool(busy.started), 20)
            await asyncio.sleep(25)
            assert len(busy.started) == 1
            assert coordinator.gauge("kvmesh_migration_decisions_total", verdict="denied") == 1
            busy.denial = None
            await scene.until(lambda: len(busy.started) == 2, 20)
            await busy.end(busy.started[1].move_id, MigrationPhase.FAILED)
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
            await scene.until(lambda: [role for one in prefills for role in one.roles] == [Role.DECODE], 20)
            await asyncio.sleep(20)
            assert sum(len(one.roles) for one in prefills) == 1, "then all rest"

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
