from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from libs.kv.checksum import block_checksums, checksum_of_blocks
from services.kv_store.dram_tier import DramTier, LayerCorrupt, Put, PutRefused

NUM_LAYERS, LAYER_BYTES = 3, 64
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


def put(tier: DramTier, *numbers: int, now: float = 0.0) -> Put:
    begun = tier.begin_put(names(*numbers), NUM_LAYERS, LAYER_BYTES, now)
    for layer in range(NUM_LAYERS):
        body = layer_of(numbers, layer)
        assert tier.put_layers(begun, one(layer), body, proof(body, len(numbers))) == (
            layer == NUM_LAYERS - 1
        )
    return begun


def tier_of(num_blocks: int) -> DramTier:
    return DramTier(budget_bytes=num_blocks * BLOCK_BYTES)


@given(st.permutations([1, 2, 3, 4]), st.integers(1, 4))
def test_what_is_fetched_is_what_was_put_however_puts_and_fetches_cut_the_chain(
    order: list[int], cut: int
) -> None:
    tier = tier_of(4)
    put(tier, *order[:cut])
    if order[cut:]:
        put(tier, *order[cut:])
    wanted = order[::-1]
    assert tier.begin_fetch(names(*wanted)) == (NUM_LAYERS, LAYER_BYTES)
    for layer in range(NUM_LAYERS):
        body, checksum = tier.arena.read_layers(names(*wanted), one(layer))
        assert np.array_equal(body, layer_of(wanted, layer))
        assert checksum == proof(body, 4)
    tier.end_fetch(names(*wanted))


def test_a_put_is_found_only_when_its_last_layer_is_there() -> None:
    tier = tier_of(4)
    begun = tier.begin_put(names(1, 2), NUM_LAYERS, LAYER_BYTES, 0.0)
    for layer in (2, 0):
        body = layer_of((1, 2), layer)
        assert not tier.put_layers(begun, one(layer), body, proof(body, 2))
        assert tier.find(names(1, 2), 0.0, 1.0) == 0
    assert tier.put_layers(begun, one(1), layer_of((1, 2), 1), proof(layer_of((1, 2), 1), 2))
    assert tier.find(names(1, 2, 3), 0.0, 1.0) == 2


def test_a_corrupt_layer_is_refused_and_the_dropped_put_leaves_nothing() -> None:
    tier = tier_of(4)
    begun = tier.begin_put(names(1, 2), NUM_LAYERS, LAYER_BYTES, 0.0)
    body = layer_of((1, 2), 0)
    checksum = proof(body, 2)
    body[70] ^= 4
    with pytest.raises(LayerCorrupt):
        tier.put_layers(begun, one(0), body, checksum)
    tier.drop_put(begun)
    assert (tier.index.num_used_bytes, tier.index.num_staged) == (0, 0)


@pytest.mark.parametrize("layer", [3, -1, 0])
def test_a_layer_out_of_range_or_twice_is_refused(layer: int) -> None:
    tier = tier_of(4)
    begun = tier.begin_put(names(1), NUM_LAYERS, LAYER_BYTES, 0.0)
    body = layer_of((1,), 0)
    tier.put_layers(begun, one(0), body, proof(body, 1))
    with pytest.raises(PutRefused, match="each layer once"):
        tier.put_layers(begun, one(layer), body, proof(body, 1))


def test_a_layer_of_another_size_is_refused() -> None:
    tier = tier_of(4)
    begun = tier.begin_put(names(1), NUM_LAYERS, LAYER_BYTES, 0.0)
    with pytest.raises(PutRefused, match="63 bytes"):
        tier.put_layers(begun, one(0), layer_of((1,), 0)[1:], 0)


def test_damage_in_memory_after_the_put_shows_in_the_fetched_checksum() -> None:
    tier = tier_of(4)
    put(tier, 1, 2)
    clean, checksum = tier.arena.read_layers(names(1, 2), one(1))
    tier.arena._buffers[names(2)[0]].data[1, 5] ^= 1
    damaged, same_checksum = tier.arena.read_layers(names(1, 2), one(1))
    assert checksum == same_checksum == proof(clean, 2) != proof(damaged, 2)


def test_new_blocks_push_out_the_oldest_and_reuse_their_memory() -> None:
    tier = tier_of(2)
    put(tier, 1, 2)
    before = tier.arena.num_allocated_bytes
    put(tier, 3, 4)
    assert tier.find(names(1), 0.0, 1.0) == 0
    assert tier.find(names(3, 4), 0.0, 1.0) == 2
    assert tier.arena.num_allocated_bytes == before == 2 * BLOCK_BYTES
    assert tier.num_evicted == 2


def test_blocks_told_of_stay_for_the_lease_and_blocks_read_until_the_end() -> None:
    tier = tier_of(2)
    put(tier, 1, 2)
    assert tier.find(names(1, 2), 0.0, 5.0) == 2
    with pytest.raises(PutRefused, match="no room"):
        tier.begin_put(names(3), NUM_LAYERS, LAYER_BYTES, 4.9)
    assert tier.begin_fetch(names(1, 2)) == (NUM_LAYERS, LAYER_BYTES)
    with pytest.raises(PutRefused, match="no room"):
        tier.begin_put(names(3), NUM_LAYERS, LAYER_BYTES, 5.0)
    tier.end_fetch(names(1, 2))
    put(tier, 3, now=5.0)


def test_blocks_of_two_shapes_are_never_fetched_as_one() -> None:
    tier = tier_of(4)
    put(tier, 1)
    other = tier.begin_put(names(2), 1, 100, 0.0)
    body = np.zeros(100, dtype=np.uint8)
    assert tier.put_layers(other, one(0), body, proof(body, 1))
    assert tier.begin_fetch(names(1, 2)) is None
    assert tier.begin_fetch(names(1, 9)) is None
    assert tier.begin_fetch([]) is None
    put(tier, 3, 4, 5)


def test_memory_of_another_shape_is_given_back_before_the_budget_is_passed() -> None:
    tier = tier_of(4)
    put(tier, 1, 2, 3, 4)
    for number in range(10, 20):
        begun = tier.begin_put(names(number), 1, BLOCK_BYTES + 7, 0.0)
        body = np.zeros(BLOCK_BYTES + 7, dtype=np.uint8)
        tier.put_layers(begun, one(0), body, proof(body, 1))
        assert tier.arena.num_allocated_bytes <= tier.index.budget_bytes


@pytest.mark.parametrize(("num_layers", "layer_bytes", "numbers"), [(0, 64, (1,)), (3, 0, (1,)), (3, 64, ())])
def test_a_put_of_nothing_is_refused(num_layers: int, layer_bytes: int, numbers: tuple[int, ...]) -> None:
    with pytest.raises(PutRefused):
        tier_of(4).begin_put(names(*numbers), num_layers, layer_bytes, 0.0)


def test_layers_may_come_and_go_in_groups() -> None:
    tier = tier_of(4)
    begun = tier.begin_put(names(1, 2), NUM_LAYERS, LAYER_BYTES, 0.0)
    body = np.concatenate([layer_of((1, 2), 0), layer_of((1, 2), 1)])
    assert not tier.put_layers(begun, range(2), body, proof(body, 4))
    with pytest.raises(PutRefused, match="each layer once"):
        tier.put_layers(begun, range(1, 3), body, proof(body, 4))
    assert tier.put_layers(begun, one(2), layer_of((1, 2), 2), proof(layer_of((1, 2), 2), 2))
    read, checksum = tier.arena.read_layers(names(2, 1), range(1, 3))
    assert np.array_equal(read, np.concatenate([layer_of((2, 1), 1), layer_of((2, 1), 2)]))
    assert checksum == proof(read, 4)
