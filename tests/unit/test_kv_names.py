import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from libs.kv.checksum import block_checksums, checksum, checksum_of_blocks
from libs.kv.names import NAME_BYTES, block_names, next_name, root_name, split_names
from libs.kv.tensors import BlockShape, bytes_of

tokens = st.lists(st.integers(0, 200_000), max_size=70)


@given(tokens, st.integers(1, 17))
def test_every_full_block_and_no_other_has_a_name(ids: list[int], block_size: int) -> None:
    names = block_names(ids, block_size, "model", "")
    assert len(names) == len(ids) // block_size
    assert all(len(name) == NAME_BYTES for name in names)


@given(tokens, tokens, st.integers(1, 8))
def test_names_agree_exactly_as_far_as_the_tokens_agree(a: list[int], b: list[int], block_size: int) -> None:
    for index, (name_a, name_b) in enumerate(
        zip(block_names(a, block_size, "m", "s"), block_names(b, block_size, "m", "s"), strict=False)
    ):
        until = (index + 1) * block_size
        assert (name_a == name_b) == (a[:until] == b[:until])


def test_names_do_not_cross_models_salts_or_block_sizes() -> None:
    ids = list(range(16))
    seen = {
        block_names(ids[:size], size, fingerprint, salt)[0]
        for fingerprint, salt, size in [
            ("a", "", 8),
            ("b", "", 8),
            ("a", "x", 8),
            ("ax", "", 8),
            ("", "ax", 8),
            ("a", "", 4),
        ]
    }
    assert len(seen) == 6


def test_a_chain_can_be_continued_from_its_last_name() -> None:
    ids = np.arange(32, dtype="<i4")
    names = block_names(ids, 16, "m", "")
    first = next_name(root_name("m", "", 16), ids[:16].tobytes())
    assert names == [first, next_name(first, ids[16:].tobytes())]


def test_joined_names_split_again_and_torn_ones_are_refused() -> None:
    names = block_names(list(range(48)), 16, "m", "")
    assert split_names(b"".join(names)) == names
    with pytest.raises(ValueError, match="16 bytes each"):
        split_names(b"x" * 17)


def test_the_checksum_is_xxh3_64_of_the_bytes_and_sees_one_flipped_bit() -> None:
    body = np.arange(1000, dtype=np.uint8)
    whole = checksum(body)
    assert whole == xxhash.xxh3_64_intdigest(body.tobytes())
    body[517] ^= 1
    assert checksum(body) != whole
    with pytest.raises(ValueError, match="contiguous"):
        checksum(body[::2])


def test_an_empty_body_has_a_checksum_too() -> None:
    assert checksum(np.empty(0, dtype=np.uint8)) == xxhash.xxh3_64_intdigest(b"")


def test_block_checksums_prove_each_block_wherever_it_travels() -> None:
    body = np.arange(120, dtype=np.uint8)
    sums = block_checksums(body, 3)
    assert sums.tolist() == [checksum(body[:40]), checksum(body[40:80]), checksum(body[80:])]
    assert checksum_of_blocks(sums[:2]) == checksum_of_blocks(block_checksums(body[:80], 2))
    assert checksum_of_blocks(sums[:2]) != checksum_of_blocks(sums[[1, 0]])
    with pytest.raises(ValueError, match="equal blocks"):
        block_checksums(body, 7)


def test_blocks_are_the_same_memory_as_bytes_and_as_a_tensor() -> None:
    shape = BlockShape(num_kv_heads=3, block_size=16, head_dim=8, dtype=torch.bfloat16)
    blocks = torch.randn(5, 3, 2, 16, 8).to(torch.bfloat16)
    body = bytes_of(blocks)
    assert body.size == 5 * shape.num_bytes
    assert torch.equal(shape.tensor_of(body, 5), blocks)
    assert shape.tensor_of(body, 5).data_ptr() == blocks.data_ptr()
    with pytest.raises(ValueError, match="4 blocks take"):
        shape.tensor_of(body, 4)
