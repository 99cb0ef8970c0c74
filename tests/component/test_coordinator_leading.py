"""Several coordinators, one leads; workers tell a new leader what is under way."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator_scene import Scene, coordinator_scene

from libs.bus.errors import NoResponders
from libs.bus.messages.migration import ExplainRounds
from libs.placement.migration import MigrationPhase

Run = Callable[[Coroutine[Any, Any, Any]], Any]


async def leaders(scene: Scene) -> int:
    return sum(one.leads for one in scene.coordinators if one.is_alive)


def test_of_two_coordinators_one_leads_and_the_other_takes_over_when_it_drains(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            first = await scene.coordinator("first")
            await scene.until(lambda: first.leads)
            second = await scene.coordinator("second")
            await asyncio.sleep(5)
            assert first.leads
            assert not second.leads
            assert (await scene.ask(ExplainRounds())).leader == "first"
            assert await first.end() == 0
            await scene.until(lambda: second.leads, 1.5)
            assert (await scene.ask(ExplainRounds())).leader == "second"

    run_virtually(scenario())


def test_a_killed_leader_is_followed_when_its_lease_has_run_out(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            first = await scene.coordinator("first")
            await scene.until(lambda: first.leads)
            second = await scene.coordinator("second")
            await asyncio.sleep(2)
            await first.kill()
            assert not second.leads
            await scene.until(lambda: second.leads, 4.5)

    run_virtually(scenario())


def test_a_move_goes_on_without_its_coordinator_and_the_next_one_adopts_it(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, host, first = await scene.pair()
            second = await scene.coordinator("second", automatic=False)
            move_id = await scene.order_by_hand(home, host)
            await first.kill()
            await scene.until(lambda: second.leads)
            adopted = scene.move(move_id)
            assert adopted is not None
            assert adopted.phase is MigrationPhase.COPYING
            assert second.gauge("kvmesh_coordinator_num_moves") == 1
            await home.end(move_id)
            await scene.until(lambda: second.gauge("kvmesh_coordinator_num_moves") == 0)
            ended = scene.move(move_id)
            assert ended is not None
            assert ended.phase is MigrationPhase.DONE

    run_virtually(scenario())


def test_one_that_starts_later_learns_of_moves_from_what_the_workers_tell(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, host, first = await scene.pair()
            move_id = await scene.order_by_hand(home, host)
            await first.kill()
            second = await scene.coordinator("second", automatic=False)
            await scene.until(lambda: second.leads)
            await asyncio.sleep(1)
            known = scene.move(move_id)
            assert known is not None
            assert known.phase is MigrationPhase.COPYING

    run_virtually(scenario())


def test_a_new_leader_abandons_what_is_past_its_deadline(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, host, first = await scene.pair(move_deadline_seconds=4)
            move_id = await scene.order_by_hand(home, host)
            await first.kill()
            second = await scene.coordinator("second", automatic=False, move_deadline_seconds=4)
            await scene.until(lambda: second.leads)
            await scene.until(lambda: home.abandoned == [move_id], 15)
            await scene.until(lambda: second.gauge("kvmesh_coordinator_num_moves") == 0)

    run_virtually(scenario())


def test_a_broker_that_comes_back_empty_has_one_leader_again(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            for name in ("first", "second", "third"):
                await scene.coordinator(name)
            await scene.until(lambda: any(one.leads for one in scene.coordinators))
            for _ in range(3):
                scene.broker.stop()
                assert await leaders(scene) == 0
                await asyncio.sleep(2)
                scene.broker.start()
                assert await leaders(scene) == 0, "nobody leads by a lease that the broker may have forgotten"
                await scene.until(lambda: any(one.leads for one in scene.coordinators), 4)
                for _ in range(40):
                    assert await leaders(scene) <= 1
                    await asyncio.sleep(0.1)

    run_virtually(scenario())


def test_a_coordinator_that_drains_alone_leaves_nobody_to_ask(run_virtually: Run) -> None:
    async def scenario() -> None:
        async with coordinator_scene() as scene:
            home, host, only = await scene.pair()
            move_id = await scene.order_by_hand(home, host)
            assert await only.end() == 0
            assert await scene.asker.lease_holder("migration-coordinator") is None
            try:
                await scene.ask(ExplainRounds())
            except NoResponders:
                pass
            else:
                raise AssertionError("somebody answered")
            assert scene.workers["decode-0"].moves[move_id].phase is MigrationPhase.COPYING
            assert not scene.workers["decode-0"].abandoned

    run_virtually(scenario())
