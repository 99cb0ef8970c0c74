import asyncio
import os
import random
import sys
from pathlib import Path

from disk_blocks import chain, names_of, opened, read
from disk_writer import BATCH_BLOCKS

WRITER = Path(__file__).with_name("disk_writer.py")
ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 5


async def killed_writer(folder: Path, first: int, num_steps: int) -> list[tuple[str, int]]:
    """The steps that had returned when the process was killed, shortly after `num_steps` of them."""
    paths = os.pathsep.join([str(ROOT), str(WRITER.parent)])
    writer = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WRITER),
        str(folder),
        str(first),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert writer.stdout is not None
    steps = [await writer.stdout.readline() for _ in range(num_steps)]
    writer.kill()
    rest = await writer.stdout.read()
    await writer.wait()
    lines = [*steps, *rest.splitlines(keepends=True)]
    pairs = [line.decode().split() for line in lines if line.endswith(b"\n")]
    return [(what, int(number)) for what, number in pairs]


async def test_after_kills_in_mid_write_what_returned_is_held_and_all_is_right(
    tmp_path: Path,
) -> None:
    rnd = random.Random(20)
    for number in range(NUM_ROUNDS):
        first = 100_000 * number
        steps = await killed_writer(tmp_path, first, rnd.randint(2, 40))
        written = [start for what, start in steps if what == "wrote"]
        removed = [start for what, start in steps if what == "removed"]
        async with opened(tmp_path) as (tier, found):
            held = set(names_of(found))
            assert not (await read(tier, held)).missed
            assert tier.counts.num_index_drops == 0
            last = written[-1] if written else first - BATCH_BLOCKS
            for start in written:
                batch = names_of(chain(start, BATCH_BLOCKS))
                assert held >= set(batch) - set(batch[::3])
                if start in removed:
                    assert held.isdisjoint(batch[::3])
            beyond = names_of(chain(last + BATCH_BLOCKS, 3 * BATCH_BLOCKS))
            assert held.isdisjoint(beyond[BATCH_BLOCKS:])
            assert tier.num_blocks == len(held)
