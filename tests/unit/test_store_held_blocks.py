"""Puts, fetches and room in memory, without a disk."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from libs.bus.messages.kv_events import Tier
from libs.kv.block_tree import DISK, MEMORY
from libs.kv.checksum import block_checksums, checksum_of_blocks
from services.kv_store import held_blocks
from services.kv_store.held_blocks import HeldBlocks, LayerCorrupt, Nodes, Put, PutRefused
from services.kv_store.sending import FetchSource, SendBuffers

NUM_LAYERS, LAYER_BYTES = SHAPE = (3, 64)
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def layer_of(numbers: Sequence[int], layer: int) -> NDArray[np.uint8]:
    """Bytes that tell block and layer apart."""
    return np.concatenate([np.full(LAYER_BYTES, number * 8 + layer, dtype=np.uint8) for number in numbers])


def proof(body: NDArray[np.uint8], num_blocks: int) -> int:
    return checksum_of_blocks(block_checksums(body, num_blocks))


def one(layer: int) -> range:
    return range(layer, layer + 1)


def blocks_of(num_blocks: int, **more: Any) -> HeldBlocks:
    return HeldBlocks(num_blocks * BLOCK_BYTES, capacity=64, **more)


async def put(blocks: HeldBlocks, *numbers: int, now: float = 0.0, parent: bytes = b"") -> Nodes:
    begun = blocks.begin_put(names(*numbers), SHAPE, now, parent=parent)
    return await fill(blocks, begun, numbers, now)


async def fill(blocks: HeldBlocks, begun: Put, numbers: Sequence[int], now: float = 0.0) -> Nodes:
    for layer in range(NUM_LAYERS):
        body = layer_of(numbers, layer)
        is_last = await blocks.put_layers(begun, one(layer), body, proof(body, len(numbers)))
        assert is_last == (layer == NUM_LAYERS - 1)
    return blocks.commit(begun, now)


async def fetch(blocks: HeldBlocks, *numbers: int) -> list[tuple[NDArray[np.uint8], int]]:
    nodes = blocks.begin_fetch(names(*numbers), 0.0)
    assert nodes is not None
    source, buffers = FetchSource(blocks, nodes, None, None), SendBuffers()
    bodies: list[tuple[NDArray[np.uint8], int]] = []
    for layer in range(NUM_LAYERS):
        sent = await source.body(one(layer), buffers)
        assert sent is not None
        bodies.append((sent[0].copy(), sent[1]))
    blocks.end_fetch(nodes)
    return bodies


@given(st.permutations([1, 2, 3, 4]), st.integers(1, 4))
def test_what_is_fetched_is_what_was_put_however_puts_and_fetches_cut_the_chain(
    order: list[int], cut: int
) -> None:
    async def scenario() -> None:
        blocks = blocks_of(4)
        await put(blocks, *order[:cut])
        if order[cut:]:
            await put(blocks, *order[cut:])
        wanted = order[::-1]
        for layer, (body, checksum) in enumerate(await fetch(blocks, *wanted)):
            assert np.array_equal(body, layer_of(wanted, layer))
            assert checksum == proof(body, 4)

    asyncio.run(scenario())


async def test_a_put_is_found_only_when_its_last_layer_is_there() -> None:
    blocks = blocks_of(4)
    begun = blocks.begin_put(names(1, 2), SHAPE, 0.0)
    assert blocks.num_staged == 2
    await fill(blocks, begun, (1, 2))
    assert blocks.find(names(1, 2, 3), 0.0, 1.0).nodes.size == 2
    assert blocks.num_staged == 0


async def test_a_corrupt_layer_is_refused_and_the_dropped_put_leaves_nothing() -> None:
    blocks = blocks_of(4)
    begun = blocks.begin_put(names(1, 2), SHAPE, 0.0)
    body = layer_of((1, 2), 0)
    checksum = proof(body, 2)
    body[70] ^= 4
    with pytest.raises(LayerCorrupt):
        await blocks.put_layers(begun, one(0), body, checksum)
    blocks.drop_put(begun)
    assert (blocks.slab.num_used_bytes, blocks.num_staged, len(blocks.tree)) == (0, 0, 0)


@pytest.mark.parametrize("layer", [3, -1, 0, 10**12])
async def test_a_layer_out_of_range_or_twice_is_refused(layer: int) -> None:
    blocks = blocks_of(4)
    begun = blocks.begin_put(names(1), SHAPE, 0.0)
    body = layer_of((1,), 0)
    await blocks.put_layers(begun, one(0), body, proof(body, 1))
    with pytest.raises(PutRefused, match="each layer once"):
        await blocks.put_layers(begun, one(layer), body, proof(body, 1))


async def test_a_layer_of_another_size_is_refused() -> None:
    blocks = blocks_of(4)
    begun = blocks.begin_put(names(1), SHAPE, 0.0)
    with pytest.raises(PutRefused, match="63 bytes"):
        await blocks.put_layers(begun, one(0), layer_of((1,), 0)[1:], 0)


async def test_damage_in_memory_after_the_put_shows_in_the_fetched_checksum() -> None:
    blocks = blocks_of(4)
    nodes = await put(blocks, 1, 2)
    (piece,) = blocks.slab.pieces(blocks.tree.slot[nodes], range(NUM_LAYERS))
    piece.data[1, 1, 5] ^= 1
    body, checksum = (await fetch(blocks, 1, 2))[1]
    assert checksum == proof(layer_of((1, 2), 1), 2) != proof(body, 2)


async def test_new_blocks_push_out_the_oldest_and_reuse_their_memory() -> None:
    blocks = blocks_of(2)
    await put(blocks, 1, 2)
    before = blocks.slab.num_allocated_bytes
    await put(blocks, 3, 4)
    assert blocks.find(names(1), 0.0, 1.0).nodes.size == 0
    assert blocks.find(names(3, 4), 0.0, 1.0).nodes.size == 2
    assert blocks.slab.num_allocated_bytes == before == 2 * BLOCK_BYTES
    assert blocks.num_evicted == {MEMORY: 2, DISK: 0}


async def test_a_chain_gives_way_from_its_end() -> None:
    blocks = blocks_of(4)
    await put(blocks, 1, 2, 3, 4)
    await put(blocks, 9)
    assert blocks.find(names(1, 2, 3, 4), 0.0, 0.0).nodes.size == 3


async def test_what_a_put_goes_on_from_does_not_give_way_to_it() -> None:
    blocks = blocks_of(3)
    await put(blocks, 1)
    await put(blocks, 8, 9)
    begun = blocks.begin_put(names(1, 2, 3), SHAPE, 1.0)
    await fill(blocks, begun, (1, 2, 3), 1.0)
    assert blocks.find(names(1, 2, 3), 1.0, 0.0).nodes.size == 3
    with pytest.raises(PutRefused, match="no room"):
        blocks.begin_put(names(1, 2, 3, 4), SHAPE, 2.0)


async def test_blocks_told_of_stay_for_the_lease_and_blocks_read_until_the_end() -> None:
    blocks = blocks_of(2)
    await put(blocks, 1, 2)
    assert blocks.find(names(1, 2), 0.0, 5.0).nodes.size == 2
    with pytest.raises(PutRefused, match="no room"):
        blocks.begin_put(names(3), SHAPE, 4.9)
    nodes = blocks.begin_fetch(names(1, 2), 5.0)
    assert nodes is not None
    with pytest.raises(PutRefused, match="no room"):
        blocks.begin_put(names(3), SHAPE, 5.0)
    blocks.end_fetch(nodes)
    await put(blocks, 3, now=5.0)
    assert blocks.find(names(1, 2), 5.0, 0.0).nodes.size == 1


async def test_leased_blocks_leave_memory_for_new_ones_only_where_the_disk_has_them() -> None:
    blocks = blocks_of(4)
    on_disk = await put(blocks, 1, 2)
    await put(blocks, 3, 4)
    blocks.note_written(on_disk)
    for chain in (names(1, 2), names(3, 4)):
        assert blocks.find(chain, 0.0, 5.0).nodes.size == 2
    await put(blocks, 5, 6, now=1.0)
    assert blocks.find(names(1, 2), 1.0, 5.0).num_in_memory == 0
    assert blocks.find(names(3, 4), 1.0, 5.0).num_in_memory == 2
    blocks.find(names(5, 6), 1.0, 5.0)
    with pytest.raises(PutRefused, match="no room"):
        await put(blocks, 7, now=2.0)


async def test_blocks_of_two_shapes_are_never_fetched_as_one() -> None:
    blocks = HeldBlocks(1 << 22, capacity=64)
    await put(blocks, 1)
    other = blocks.begin_put(names(2), (1, 100), 0.0)
    body = np.zeros(100, dtype=np.uint8)
    assert await blocks.put_layers(other, one(0), body, proof(body, 1))
    blocks.commit(other, 0.0)
    for wanted in (names(1, 2), names(1, 9), []):
        assert blocks.begin_fetch(wanted, 0.0) is None
    assert not blocks.tree.num_readers.any()


async def test_blocks_of_another_shape_take_over_memory_without_passing_the_budget() -> None:
    blocks = blocks_of(4)
    await put(blocks, 1, 2, 3, 4)
    for number in range(10, 20):
        begun = blocks.begin_put(names(number), (1, BLOCK_BYTES + 7), 0.0)
        body = np.zeros(BLOCK_BYTES + 7, dtype=np.uint8)
        assert await blocks.put_layers(begun, one(0), body, proof(body, 1))
        blocks.commit(begun, 0.0)
        assert blocks.slab.num_allocated_bytes <= blocks.slab.budget_bytes
    assert blocks.find(names(19), 0.0, 0.0).nodes.size == 1


@pytest.mark.parametrize(
    ("shape", "numbers", "parent"),
    [
        ((0, 64), (1,), b""),
        ((3, 0), (1,), b""),
        ((-3, -64), (1,), b""),
        ((10**9, 10**9), (1,), b""),
        ((3, 10**15), (1,), b""),
        ((3, 64), (), b""),
        ((3, 64), (1, 2, 1), b""),
        ((3, 64), (1, 2), names(2)[0]),
    ],
)
async def test_an_impossible_put_is_refused_and_costs_nobody_anything(
    shape: tuple[int, int], numbers: tuple[int, ...], parent: bytes
) -> None:
    blocks = blocks_of(4)
    await put(blocks, 7, 8, 9)
    with pytest.raises(PutRefused):
        blocks.begin_put(names(*numbers), shape, 0.0, parent=parent)
    assert (len(blocks.tree), blocks.num_staged, blocks.shapes) == (3, 0, [SHAPE])


async def test_no_more_names_are_taken_than_the_tree_has_room_for() -> None:
    blocks = HeldBlocks(1 << 20, capacity=3)
    staged = blocks.begin_put(names(1, 2), SHAPE, 0.0)
    with pytest.raises(PutRefused, match="names"):
        blocks.begin_put(names(3, 4), SHAPE, 0.0)
    assert (await fill(blocks, staged, (1, 2))).size == 2


async def test_a_block_that_two_bring_at_once_is_kept_once() -> None:
    blocks = blocks_of(8)
    first = blocks.begin_put(names(1, 2), SHAPE, 0.0)
    second = blocks.begin_put(names(1, 2, 3), SHAPE, 0.0)
    assert second.fresh.tolist() == [2]
    await fill(blocks, second, (1, 2, 3))
    assert blocks.find(names(1, 2, 3), 0.0, 0.0).nodes.size == 0
    await fill(blocks, first, (1, 2))
    assert blocks.find(names(1, 2, 3), 0.0, 0.0).nodes.size == 3
    assert blocks.slab.num_used_bytes == 3 * BLOCK_BYTES
    # Its parent came later; it hangs from it all the same.
    assert blocks.tree.parent_of(blocks.tree.node_of(names(3)[0])) == blocks.tree.node_of(names(2)[0])


async def test_layers_may_come_in_groups_and_large_ones_let_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_blocks, "COPY_BYTES", LAYER_BYTES)
    blocks = blocks_of(4)
    await put(blocks, 2)
    begun = blocks.begin_put(names(1, 2, 3), SHAPE, 0.0)
    assert begun.fresh.tolist() == [0, 2]
    body = np.concatenate([layer_of((1, 2, 3), 0), layer_of((1, 2, 3), 1)])
    turns: list[int] = []
    loop = asyncio.get_running_loop()
    loop.call_soon(turns.append, 1)
    assert not await blocks.put_layers(begun, range(2), body, proof(body, 6))
    assert turns
    with pytest.raises(PutRefused, match="each layer once"):
        await blocks.put_layers(begun, range(1, 3), body, proof(body, 6))
    last = layer_of((1, 2, 3), 2)
    assert await blocks.put_layers(begun, one(2), last, proof(last, 3))
    blocks.commit(begun, 0.0)
    for layer, (sent, checksum) in enumerate(await fetch(blocks, 3, 1, 2)):
        assert np.array_equal(sent, layer_of((3, 1, 2), layer))
        assert checksum == proof(sent, 3)


async def test_others_are_told_of_what_comes_and_goes() -> None:
    told: list[tuple[str, Tier, list[bytes]]] = []
    blocks = blocks_of(
        2,
        on_stored=lambda tier, which: told.append(("stored", tier, list(which))),
        on_removed=lambda tier, which: told.append(("removed", tier, list(which))),
    )
    nodes = await put(blocks, 1, 2)
    blocks.note_written(nodes)
    await put(blocks, 3)
    blocks.lose(int(nodes[1]))
    assert told == [
        ("stored", Tier.DRAM, names(1, 2)),
        ("stored", Tier.DISK, names(1, 2)),
        ("removed", Tier.DRAM, names(2)),
        ("stored", Tier.DRAM, names(3)),
        ("removed", Tier.DISK, names(2)),
    ]


async def test_a_lost_block_takes_its_subtree_along_but_not_from_under_a_reader() -> None:
    blocks = blocks_of(4)
    nodes = await put(blocks, 1, 2, 3)
    blocks.note_written(nodes)
    reading = blocks.begin_fetch(names(1, 2, 3), 0.0)
    assert reading is not None
    used = blocks.slab.num_used_bytes
    blocks.tree.end_reading(reading[1:2])
    blocks.drop([int(nodes[1])], MEMORY)
    blocks.tree.begin_reading(reading[1:2])
    blocks.lose(int(nodes[1]))
    assert blocks.find(names(1, 2, 3), 0.0, 0.0).nodes.size == 1
    assert blocks.slab.num_used_bytes == used - BLOCK_BYTES
    blocks.end_fetch(reading)
    assert blocks.slab.num_used_bytes == BLOCK_BYTES
    assert blocks.tree.num_free == 63
