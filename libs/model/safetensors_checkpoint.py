"""Weights of a Hugging Face directory: safetensors, in one file or in shards with an index."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from libs.model.checkpoint import TensorSpan
from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.hf_config import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """Memory-mapped safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._spans: dict[str, TensorSpan] = {}
        for path in _files(directory):
            self._spans.update(_spans(path))
        self._files: dict[Path, Any] = {}

    @property
    def spans(self) -> Mapping[str, TensorSpan]:
        """All tensors that are there."""
        return self._spans

    def read(self, name: str) -> torch.Tensor:
        """One tensor, still in the file's memory map.

        Raises:
            UnsupportedModel: its numbers are not plain floating point, so the checkpoint is quantised.
        """
        span = self._spans[name]
        if span.encoding not in _FLOATS:
            raise UnsupportedModel(
                f"tensor {name} holds {span.encoding}: quantised checkpoints are not supported; "
                "use the unquantised repository, or a GGUF file"
            )
        if span.path not in self._files:
            self._files[span.path] = safe_open(span.path, framework="pt")
        tensor: torch.Tensor = self._files[span.path].get_tensor(name)
        return tensor


def _files(directory: Path) -> list[Path]:
    """The files that hold the weights, by the index where there is one."""
    index = directory / _INDEX
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    elif (directory / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        raise BrokenModel(
            f"{directory} has neither {_SINGLE} nor {_INDEX}; download the safetensors weights "
            "(pickled weights, `pytorch_model.bin`, are not read)"
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise BrokenModel(f"{directory} lacks {', '.join(missing)}, which its index names; download it again")
    return [directory / name for name in names]


def _spans(path: Path) -> dict[str, TensorSpan]:
    """Where each tensor of a file lies, from its header."""
    try:
        with safe_open(path, framework="np"):  # checks sizes and offsets of the whole file
            pass
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError) as error:
        raise BrokenModel(
            f"{path} is not a complete safetensors file ({error}); download it again"
        ) from error
    origin = 8 + header_bytes
    header.pop("__metadata__", None)
    return {
        name: TensorSpan(
            path=path,
            start=origin + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            encoding=entry["dtype"],
            shape=tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }
