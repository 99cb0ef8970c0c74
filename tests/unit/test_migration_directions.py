"""A move that is given up while its beginning waits in the engine leaves nothing begun."""

import asyncio
from typing import Any, cast

from libs.engine.migration.live_migration import LiveMigration
from libs.placement.module import whole_layers
from libs.placement.placement import PlacedModule
from libs.worker.migration.owner.directions import Inbound


class LateHome:
    """An engine in which a beginning waits its turn."""

    def __init__(self) -> None:
        self.may_begin = asyncio.Event()
        self.did: list[str] = []

    async def begin_return(self, move_id: str, *, model_after: Any = None) -> int:
        await asyncio.shield(self.may_begin.wait())
        self.did.append("begun")
        return 1

    async def cancel_move(self, move_id: str) -> None:
        self.did.append("cancelled")


async def nothing(num_bytes: int) -> None: ...


def way(home: LateHome) -> Inbound:
    placed = PlacedModule(move_id="m", module=whole_layers(0, 1), worker="host")
    return Inbound(cast("LiveMigration", home), lambda: None, placed)


async def test_a_beginning_that_nobody_waits_for_any_more_is_cancelled_after_it_began() -> None:
    home = LateHome()
    returning = way(home)
    beginning = asyncio.ensure_future(returning.begin(nothing))
    await asyncio.sleep(0)
    beginning.cancel()
    await asyncio.wait({beginning})
    rolling_back = asyncio.ensure_future(returning.roll_back())
    await asyncio.sleep(0)
    assert not home.did
    home.may_begin.set()
    await rolling_back
    assert home.did == ["begun", "cancelled"]


async def test_a_move_that_never_began_is_cancelled_at_once() -> None:
    home = LateHome()
    await way(home).roll_back()
    assert home.did == ["cancelled"]
