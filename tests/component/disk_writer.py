"""A process that writes and removes blocks until it is killed; prints each step once it has returned.

Arguments: the folder, the number of its first block.
"""

import asyncio
import sys
from pathlib import Path

from disk_blocks import chain, names_of, opened

BATCH_BLOCKS = 24


async def write_for_ever(folder: Path, first: int) -> None:
    async with opened(folder) as (tier, held):
        print("opened", len(held), flush=True)
        await tier.remove([block.name for block in held[600:]])
        while True:
            batch = chain(first, BATCH_BLOCKS)
            if not all(await tier.write(batch)):
                raise SystemExit("the cap is too small for this test")
            print("wrote", first, flush=True)
            await tier.remove(names_of(batch[::3]))
            print("removed", first, flush=True)
            first += BATCH_BLOCKS


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1]), int(sys.argv[2])))
