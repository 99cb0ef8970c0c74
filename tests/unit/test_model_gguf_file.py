"""The header of GGUF files: equal to what the gguf package reads, damage refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.model.errors import BrokenModel, ModelError, UnsupportedModel
from libs.model.gguf_file import read_gguf


def small_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.negative", -5)
    writer.add_float64("a.double", 0.1)
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.words", ["x", "", "ü€🤦"])
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    quantised = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


def test_metadata_and_tensors_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "small.gguf")
    file, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents(), key
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.shape, ours.kind) == (tuple(tensor.shape[::-1].tolist()), tensor.tensor_type)
        assert (ours.start, ours.num_bytes) == (int(tensor.data_offset), int(tensor.n_bytes))
    assert file.get("block_count") == 2
    assert file.get("absent", "default") == "default"


def refusal(path: Path, content: bytes) -> ModelError | None:
    path.write_bytes(content)
    try:
        read_gguf(path)
    except ModelError as error:
        return error
    return None


@pytest.mark.parametrize("damaged", [b"", b"GGUF", b"not a model at all, only some text"])
def test_what_is_no_gguf_is_refused(damaged: bytes, tmp_path: Path) -> None:
    assert isinstance(refusal(tmp_path / "damaged.gguf", damaged), BrokenModel)


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(
    data: st.DataObject, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The writer pads the end of the file, so the last bytes may be lost without harm.
    keep = data.draw(st.integers(0, len(content) - 64))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    assert isinstance(refusal(path, content[:keep]), BrokenModel)


@given(data=st.data())
def test_a_damaged_header_never_raises_anything_else(
    data: st.DataObject, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = data.draw(st.integers(0, len(content) - 9))
    damage = data.draw(st.binary(min_size=1, max_size=8))
    refusal(tmp_path_factory.getbasetemp() / "hit.gguf", content[:at] + damage + content[at + len(damage) :])


def test_other_versions_are_refused_by_number(content: bytes, tmp_path: Path) -> None:
    old = content[:4] + struct.pack("<I", 1) + content[8:]
    error = refusal(tmp_path / "old.gguf", old)
    assert isinstance(error, UnsupportedModel)
    assert "version 1" in str(error)


def test_one_part_of_several_is_refused_with_how_to_join_them(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="llama-gguf-split --merge"):
        read_gguf(tmp_path / "part.gguf")
