import asyncio
import random
from pathlib import Path

import msgspec
from disk_blocks import SETTINGS, block, name_of, names_of, opened, read

from services.kv_store.disk.disk_tier import DiskTier

SHAPE = (3, 2000)
NAMES = [name_of(number) for number in range(200)]
SMALL = msgspec.structs.replace(
    SETTINGS, segment_bytes=100_000, fsync="interval", fsync_interval_seconds=0.01
)


async def write_and_remove(tier: DiskTier, rnd: random.Random, names: list[bytes]) -> set[bytes]:
    """Returns those held at the end."""
    held: set[bytes] = set()
    for _ in range(60):
        some = rnd.sample(names, 20)
        if rnd.random() < 0.5:
            assert all(await tier.write([block(name, shape=SHAPE) for name in some]))
            held.update(some)
        else:
            await tier.remove(some)
            held.difference_update(some)
    return held


async def read_on(tier: DiskTier, rnd: random.Random, is_over: asyncio.Event) -> int:
    """Any answer is allowed but wrong bytes, which `read` looks for."""
    num_right = 0
    while not is_over.is_set():
        num_right += len((await read(tier, rnd.sample(NAMES, 40), SHAPE)).right)
    return num_right


async def test_reads_beside_writes_and_removes_give_the_right_bytes_or_a_miss(tmp_path: Path) -> None:
    """What is read and removed at once may miss; what nobody removes is never lost."""
    lasting, passing = NAMES[:40], NAMES[40:]
    is_over = asyncio.Event()
    async with opened(tmp_path, SMALL) as (tier, _):
        assert all(await tier.write([block(name, shape=SHAPE) for name in lasting]))
        upkeep = asyncio.ensure_future(tier.run(lambda: None))
        readers = [asyncio.ensure_future(read_on(tier, random.Random(i), is_over)) for i in range(3)]
        held = await write_and_remove(tier, random.Random(9), passing)
        is_over.set()
        assert all(num_right > 0 for num_right in await asyncio.gather(*readers))
        upkeep.cancel()
        await asyncio.wait([upkeep])
        assert (await read(tier, lasting, SHAPE)).right == lasting
        assert tier.counts.num_corrupt == tier.counts.num_failed == 0
    async with opened(tmp_path, SMALL) as (tier, found):
        assert set(names_of(found)) == held | set(lasting)
        assert not (await read(tier, names_of(found), SHAPE)).missed
