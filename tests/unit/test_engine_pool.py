import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.errors import OutOfBlocks
from libs.engine.memory.allocator import BlockAllocator
from libs.engine.memory.pool import BlockLayout, Pool

CPU = torch.device("cpu")


def layout(slots: tuple[tuple[int, int], ...]) -> BlockLayout:
    return BlockLayout(slots, block_size=2, head_dim=2, dtype=torch.float32)


def all_slots(num_layers: int, num_heads: int) -> tuple[tuple[int, int], ...]:
    return tuple((layer, head) for layer in range(num_layers) for head in range(num_heads))


def fill(pool: Pool, blocks: set[int]) -> None:
    """Each slot of each live block gets a value that names block, layer and head."""
    for block in blocks:
        for index, (layer, head) in enumerate(pool.layout.slots):
            pool.blocks[block, index] = 1 + block * 10000 + layer * 100 + head


def only(tensor: torch.Tensor) -> float:
    """The one value that all elements have."""
    value = float(tensor.flatten()[0])
    assert bool((tensor == value).all())
    return value


def test_a_layer_is_a_view_into_the_blocks_with_contiguous_inner_dims() -> None:
    pool = Pool(layout(all_slots(3, 2)), num_blocks=5, device=CPU)
    view = pool.layer(1)
    assert view.shape == (5, 2, 2, 2, 2)
    view[4, 1] = 7.0
    assert only(pool.blocks[4, 3]) == 7.0
    assert view[0].is_contiguous()
    assert pool.blocks.sum() == 7.0 * 8


def test_a_new_pool_is_zero() -> None:
    assert not Pool(layout(all_slots(2, 1)), num_blocks=3, device=CPU).blocks.any()


def test_departed_layers_become_more_blocks() -> None:
    pool = Pool(layout(all_slots(4, 1)), num_blocks=6, device=CPU)
    fill(pool, {0, 3})
    told = pool.relayout(layout(((1, 0), (2, 0))), live={0, 3})
    assert (told.num_blocks_before, told.num_blocks_after, told.moved) == (6, 12, {})
    assert only(pool.layer(1)[3]) == 30101.0
    assert only(pool.layer(2)[0]) == 201.0


def test_live_blocks_beyond_the_new_capacity_move_to_free_ones() -> None:
    pool = Pool(layout(((0, 0),)), num_blocks=8, device=CPU)
    fill(pool, {1, 6, 7})
    told = pool.relayout(layout(((0, 0), (1, 0))), live={1, 6, 7})
    assert told.num_blocks_after == 4
    assert set(told.moved) == {6, 7}
    assert set(told.moved.values()) <= {0, 2, 3}
    for before in (1, 6, 7):
        block = told.moved.get(before, before)
        assert only(pool.layer(0)[block]) == 1.0 + before * 10000
        assert not pool.layer(1)[block].any()


def test_a_layout_that_cannot_hold_the_live_blocks_is_refused_and_changes_nothing() -> None:
    pool = Pool(layout(((0, 0),)), num_blocks=4, device=CPU)
    live = {0, 1, 2}
    fill(pool, live)
    before = pool.blocks.clone()
    with pytest.raises(OutOfBlocks, match="3 live blocks"):
        pool.relayout(layout(all_slots(2, 1)), live)
    assert torch.equal(pool.blocks, before)


@given(data=st.data())
def test_live_blocks_keep_every_slot_that_stays(data: st.DataObject) -> None:
    slots = st.sets(st.sampled_from(all_slots(4, 2)), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    before, after = data.draw(slots), data.draw(slots)
    num_blocks = data.draw(st.integers(1, 200))
    pool = Pool(layout(before), num_blocks, CPU)
    most = min(num_blocks, pool.capacity(layout(after)))
    live = data.draw(st.sets(st.integers(0, num_blocks - 1), max_size=most))
    fill(pool, live)
    told = pool.relayout(layout(after), live)
    assert told.num_blocks_after == pool.num_blocks == num_blocks * len(before) // len(after)
    assert len({told.moved.get(block, block) for block in live}) == len(live)
    for block in live:
        content = pool.blocks[told.moved.get(block, block)]
        for index, (layer, head) in enumerate(after):
            expected = 1.0 + block * 10000 + layer * 100 + head if (layer, head) in before else 0.0
            assert only(content[index]) == expected


def test_the_allocator_follows_a_relayout() -> None:
    pool, allocator = Pool(layout(((0, 0),)), 8, CPU), BlockAllocator(8)
    first, second, third = allocator.allocate(6)[3:]
    allocator.name(third, b"n")
    allocator.release([third])
    told = pool.relayout(layout(((0, 0), (1, 0))), live={first, third})
    allocator.release([0, 1, 2, second])
    allocator.resize(told.num_blocks_after, told.moved)
    assert allocator.num_blocks == 4
    assert allocator.num_used == 1
    assert allocator.find([b"n"]) == [told.moved.get(third, third)]
    taken = allocator.allocate(3)
    assert sorted([*taken, told.moved.get(first, first)]) == [0, 1, 2, 3]
