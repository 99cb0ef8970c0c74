"""What is written to disk, when and in which order, on a disk that a test plays."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from libs.kv.block_tree import DISK, MEMORY
from libs.kv.write_policy import WritePolicy
from services.kv_store import disk_writer
from services.kv_store.disk.blocks import BlockToWrite
from services.kv_store.disk_writer import DiskWriter
from services.kv_store.held_blocks import HeldBlocks, Nodes

NUM_LAYERS, LAYER_BYTES = SHAPE = (2, 32)
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


class PlayedDisk:
    """Holds `capacity` blocks. Writes wait at `gate`."""

    def __init__(self, capacity: int = 100) -> None:
        self.capacity, self.cap_bytes = capacity, 2 * capacity * BLOCK_BYTES
        self.held: dict[bytes, tuple[bytes, bytes]] = {}
        self.batches: list[list[bytes]] = []
        self.is_paused = False
        self.gate = asyncio.Event()
        self.gate.set()

    def can_write(self, num_blocks: int, num_layers: int, layer_bytes: int) -> bool:
        assert (num_layers, layer_bytes) == SHAPE
        return not self.is_paused and len(self.held) + num_blocks <= self.capacity

    async def write(self, blocks: Sequence[BlockToWrite]) -> list[bool]:
        self.batches.append([block.name for block in blocks])
        await self.gate.wait()
        if self.is_paused:
            return [False] * len(blocks)
        assert len(self.held) + len(blocks) <= self.capacity
        for block in blocks:
            self.held[block.name] = block.parent, b"".join(layer.tobytes() for layer in block.layers)
            assert block.checksums.tolist() == [block.layers[0][0]] * NUM_LAYERS
        return [True] * len(blocks)

    async def remove(self, names: Sequence[bytes]) -> None:
        for each in names:
            self.held.pop(each, None)


class Scene:
    def __init__(self, policy: WritePolicy, disk: PlayedDisk, memory_blocks: int) -> None:
        self.disk = disk
        self.blocks = HeldBlocks(
            memory_blocks * BLOCK_BYTES,
            capacity=1000,
            on_removed=lambda tier, names: self.writer.remove(names) if tier.value == "disk" else None,
        )
        self.writer = DiskWriter(self.blocks, disk, policy)

    def put(self, *numbers: int) -> Nodes:
        put = self.blocks.begin_put([name(n) for n in numbers], SHAPE, 0.0)
        for index, number in enumerate(numbers):
            for piece in self.blocks.slab.pieces(put.slots[index : index + 1], range(NUM_LAYERS)):
                piece.data[:] = piece.checksums[:] = number
        nodes = self.blocks.commit(put, 0.0)
        self.writer.on_put(nodes)
        return nodes

    def hit(self, *numbers: int) -> None:
        self.writer.on_hit(self.blocks.find([name(n) for n in numbers], 0.0, 0.0).nodes)

    def on_disk(self) -> set[int]:
        told = {n for part in self.blocks.tree.members(DISK) for n in part}
        assert told == set(self.disk.held)
        return {int.from_bytes(n, "little") for n in told}

    async def settle(self) -> None:
        async with asyncio.timeout(5):
            await self.writer.flush()


@asynccontextmanager
async def writing(
    policy: WritePolicy = "write_through", disk: PlayedDisk | None = None, memory_blocks: int = 200
) -> AsyncIterator[Scene]:
    scene = Scene(policy, disk or PlayedDisk(), memory_blocks)
    task = asyncio.create_task(scene.writer.run())
    try:
        yield scene
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert not scene.blocks.tree.num_readers.any()


async def test_write_through_writes_what_is_put_with_its_parents() -> None:
    async with writing() as scene:
        scene.put(1, 2, 3)
        await scene.settle()
        assert scene.on_disk() == {1, 2, 3}
        assert scene.disk.held[name(2)] == (name(1), bytes([2]) * BLOCK_BYTES)
        assert scene.disk.held[name(1)][0] == b""


async def test_batches_are_a_small_part_of_memory_and_parents_come_first() -> None:
    async with writing(memory_blocks=64) as scene:
        scene.put(*range(1, 21))
        await scene.settle()
        assert max(map(len, scene.disk.batches)) <= 4
        assert [n for batch in scene.disk.batches for n in batch] == [name(n) for n in range(1, 21)]


async def test_a_full_disk_gives_up_the_oldest_for_the_new() -> None:
    async with writing(disk=PlayedDisk(capacity=4)) as scene:
        scene.put(1, 2)
        scene.put(3, 4)
        await scene.settle()
        scene.put(5)
        scene.put(6)
        await scene.settle()
        assert scene.on_disk() == {3, 4, 5, 6}
        assert scene.blocks.num_evicted == {MEMORY: 0, DISK: 2}


async def test_a_batch_larger_than_the_disk_costs_nobody_else_his_place() -> None:
    async with writing(disk=PlayedDisk(capacity=4)) as scene:
        scene.put(1, 2)
        await scene.settle()
        scene.put(*range(10, 19))
        await scene.settle()
        assert {1, 2} <= scene.on_disk()
        assert scene.writer.num_skipped == 9


async def test_a_pause_is_waited_out_and_made_up_for() -> None:
    disk = PlayedDisk()
    async with writing(disk=disk) as scene:
        disk.gate.clear()
        scene.put(1, 2)
        await until(lambda: bool(disk.batches))
        disk.is_paused = True
        disk.gate.set()
        scene.put(3)
        await scene.settle()
        assert scene.on_disk() == set()
        assert scene.writer.num_waiting == 1
        disk.is_paused = False
        scene.writer.on_resumed()
        await scene.settle()
        assert scene.on_disk() == {1, 2, 3}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the played disk announces nothing
            await asyncio.sleep(0)


async def test_what_left_memory_before_its_turn_is_not_written_and_counted() -> None:
    disk = PlayedDisk()
    async with writing(disk=disk) as scene:
        disk.gate.clear()
        scene.put(1)
        await until(lambda: bool(disk.batches))
        (late,) = scene.put(2).tolist()
        scene.blocks.drop([late], MEMORY)
        disk.gate.set()
        await scene.settle()
        assert scene.on_disk() == {1}
        assert scene.writer.num_skipped == 1


async def test_what_is_lost_while_it_is_written_is_removed_again() -> None:
    disk = PlayedDisk()
    async with writing(disk=disk) as scene:
        disk.gate.clear()
        (node,) = scene.put(1).tolist()
        await until(lambda: bool(disk.batches))
        for gone in scene.blocks.tree.doom(node):
            scene.blocks.tree.forget(gone)
        disk.gate.set()
        await scene.settle()
        assert scene.on_disk() == set()


async def test_a_block_removed_and_put_again_is_on_disk_in_the_end() -> None:
    async with writing() as scene:
        (node,) = scene.put(1).tolist()
        await scene.settle()
        scene.blocks.drop_everywhere(node)
        scene.put(1)
        await scene.settle()
        assert scene.on_disk() == {1}


async def test_selective_writes_at_the_second_hit() -> None:
    async with writing("selective") as scene:
        scene.put(1, 2)
        scene.hit(1, 2)
        await scene.settle()
        assert scene.on_disk() == set()
        scene.hit(1)
        await scene.settle()
        assert scene.on_disk() == {1}


async def test_write_back_writes_what_goes_next_after_its_parents_and_the_rest_at_the_end() -> None:
    async with writing("write_back", memory_blocks=16) as scene:
        scene.put(*range(1, 7))
        scene.put(*range(11, 17))
        await until(lambda: not scene.writer.num_waiting)
        assert scene.on_disk() == set()
        scene.put(21, 22)
        await until(lambda: bool(scene.disk.held) and not scene.writer.num_waiting)
        # Blocks go from the end of the oldest chain; on disk they are of use only with its beginning.
        assert scene.disk.batches[0] == [name(1)]
        assert scene.on_disk() == {1, 2, 3, 4, 5, 6}
        await scene.settle()
        assert scene.on_disk() == {*range(1, 7), *range(11, 17), 21, 22}


async def test_too_many_waiting_are_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "MAX_WAITING", 3)
    disk = PlayedDisk()
    disk.is_paused = True
    async with writing(disk=disk) as scene:
        scene.put(*range(1, 6))
        assert (scene.writer.num_waiting, scene.writer.num_skipped) == (3, 2)


def test_a_batch_of_one_block_is_always_possible() -> None:
    blocks = HeldBlocks(BLOCK_BYTES, capacity=4)
    writer = DiskWriter(blocks, PlayedDisk(), "write_through")
    put = blocks.begin_put([name(1)], SHAPE, 0.0)
    writer.on_put(blocks.commit(put, 0.0))
    assert writer._next_batch() == ([int(np.int64(0))], SHAPE)
