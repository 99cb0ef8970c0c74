"""Leases, on NATS and in memory."""

import asyncio

import pytest
from bus_scene import AT_ONCE_SECONDS, TTL_SECONDS, Scene, persist

from libs.bus.errors import NotConnected


async def test_of_two_who_want_a_lease_the_first_has_it_until_it_lets_go(scene: Scene) -> None:
    anna, bert = await scene.bus(), await scene.bus()
    assert await anna.lease_holder("lead") is None
    assert await anna.hold_lease("lead", "anna")
    assert not await bert.hold_lease("lead", "bert")
    assert await bert.lease_holder("lead") == "anna"
    await anna.release_lease("lead", "anna")
    assert await anna.lease_holder("lead") is None
    assert await bert.hold_lease("lead", "bert")
    assert not await anna.hold_lease("lead", "anna")


async def test_of_many_who_ask_at_once_one_has_it(scene: Scene) -> None:
    buses = [await scene.bus() for _ in range(4)]
    for name in ("lead", "other"):
        had = await asyncio.gather(
            *(bus.hold_lease(name, f"holder-{i}") for i, bus in enumerate(buses)),
            *(bus.hold_lease(name, f"holder-{i + 4}") for i, bus in enumerate(buses)),
        )
        assert sum(had) == 1
        assert await buses[0].lease_holder(name) == f"holder-{had.index(True)}"


async def test_a_lease_lasts_as_long_as_it_is_renewed(scene: Scene) -> None:
    anna, bert = await scene.bus(), await scene.bus()
    assert anna.lease_seconds == TTL_SECONDS
    assert await anna.hold_lease("lead", "anna")
    for _ in range(4):
        await scene.pass_seconds(TTL_SECONDS / 2)
        assert await anna.hold_lease("lead", "anna")
        assert not await bert.hold_lease("lead", "bert")
    await scene.pass_seconds(1.5 * TTL_SECONDS)
    assert await bert.lease_holder("lead") is None
    assert await bert.hold_lease("lead", "bert")
    assert not await anna.hold_lease("lead", "anna")


async def test_a_lease_that_ran_out_and_that_nobody_took_is_its_holders_again(scene: Scene) -> None:
    anna = await scene.bus()
    assert await anna.hold_lease("lead", "anna")
    await scene.pass_seconds(1.5 * TTL_SECONDS)
    assert await anna.hold_lease("lead", "anna")
    assert await anna.lease_holder("lead") == "anna"


async def test_letting_go_of_anothers_lease_changes_nothing(scene: Scene) -> None:
    anna, bert = await scene.bus(), await scene.bus()
    await bert.release_lease("lead", "bert")
    assert await anna.hold_lease("lead", "anna")
    await bert.release_lease("lead", "bert")
    assert await anna.lease_holder("lead") == "anna"


@pytest.mark.parametrize("keeps_store", [True, False], ids=["same-store", "empty-store"])
async def test_after_a_restart_of_the_broker_one_has_it_again(scene: Scene, keeps_store: bool) -> None:
    anna, bert = await scene.bus(), await scene.bus()
    assert await anna.hold_lease("lead", "anna")
    await scene.kill_broker()
    await scene.revive_broker(keeps_store=keeps_store)
    had = [
        await persist(lambda: anna.hold_lease("lead", "anna")),
        await persist(lambda: bert.hold_lease("lead", "bert")),
    ]
    assert had == [True, False]


async def test_while_the_broker_is_away_leases_fail_at_once(scene: Scene) -> None:
    bus = await scene.bus()
    await scene.kill_broker()
    async with asyncio.timeout(AT_ONCE_SECONDS):
        for act in (
            bus.hold_lease("lead", "anna"),
            bus.release_lease("lead", "anna"),
            bus.lease_holder("lead"),
        ):
            with pytest.raises(NotConnected):
                await act


@pytest.mark.parametrize(("name", "holder"), [("a b", "anna"), ("", "anna"), ("lead", ""), ("lead", "*")])
async def test_what_is_no_name_is_refused(scene: Scene, name: str, holder: str) -> None:
    bus = await scene.bus()
    with pytest.raises(ValueError, match="keys are"):
        await bus.hold_lease(name, holder)
