"""Parts of one prefix that are fetched from several stores at once."""

import asyncio
from collections.abc import Sequence

from libs.worker.stores.store_link import FetchResult

PartResult = tuple[FetchResult, float]
"""How it ended, and the seconds it took."""


async def until_useless(fetches: "dict[asyncio.Future[PartResult], int]") -> dict[int, PartResult]:
    """Wait for all, but not for those whose first block comes behind one that failed: without what is before,
    they are of no use, and are cancelled. Keys are futures, values their first blocks.

    Returns results by first block; those not waited for are missing.
    """
    results: dict[int, PartResult] = {}
    waiting = set(fetches)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            results |= {fetches[one]: one.result() for one in done}
            failed = [first for first, (result, _) in results.items() if result is not FetchResult.HIT]
            if failed:
                waiting = {one for one in waiting if fetches[one] < min(failed)}
    finally:
        await _end([one for one in fetches if not one.done()])
    return results


async def _end(fetches: "Sequence[asyncio.Future[PartResult]]") -> None:
    for one in fetches:
        one.cancel()
    await asyncio.gather(*fetches, return_exceptions=True)
