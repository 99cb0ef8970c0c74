"""The header of a GGUF file: metadata and where each tensor lies. No torch.

Read here and not by the gguf package because that takes 2 s for a vocabulary of 49 152 tokens and 9 s for one
of 128 256: it makes several arrays per string. This takes 0.1 s, and several processes do it at each start.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from libs.model.errors import BrokenModel, UnsupportedModel

_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor; `shape` has the fastest dimension last (the file has it first)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says about itself."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Prefix of most metadata keys."""
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata under a key that starts with the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> GgufFile:
    """Reads the header.

    Raises:
        BrokenModel: not a GGUF file, or cut short.
        UnsupportedModel: another version of the format, or one part of several.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            gguf = _read(path, data)
    except (OSError, struct.error, ValueError, TypeError, ArithmeticError) as error:
        raise BrokenModel(f"{path} is not a complete GGUF file ({error}); download it again") from error
    if gguf.metadata.get("split.count", 0) > 1:
        raise UnsupportedModel(
            f"{path.name} is one part of several; join them with `llama-gguf-split --merge`"
        )
    size = path.stat().st_size
    for name, tensor in gguf.tensors.items():
        if tensor.start + tensor.num_bytes > size:
            raise BrokenModel(f"{path} ends before tensor {name} does; download it again")
    return gguf


def with_header(source: Path | GgufFile) -> Path | GgufFile:
    """The header of a GGUF file, read unless it is read already; a directory stays as it is.

    Raises as `read_gguf` does.
    """
    return read_gguf(source) if isinstance(source, Path) and source.is_file() else source


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("<I"), self.scalar("<Q"))
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, size: int) -> list[Any]:
        if kind in _SCALARS:
            form = f"<{size}{_SCALARS[kind][1]}"
            values = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return values
        if kind == _STRING:
            return self._strings(size)
        return [self.value(kind) for _ in range(size)]

    def _strings(self, count: int) -> list[str]:
        """In one loop, without a call for each: a vocabulary has hundreds of thousands."""
        data, at, end, size_at = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            (size,) = size_at(data, at)
            start, at = at + 8, at + 8 + size
            if at > end:
                raise ValueError("a string runs past the end")
            found.append(data[start:at].decode())
        self.at = at
        return found


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    if data[:4] != b"GGUF":
        raise ValueError("it does not start with GGUF")
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise UnsupportedModel(
            f"{path.name} has GGUF version {version}, little-endian {_VERSIONS} are supported"
        )
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    headers = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    origin = -(-cursor.at // alignment) * alignment
    return GgufFile(path, metadata, {name: _place(header, origin) for name, *header in headers})


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.scalar("<I")
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")


def _place(header: list[Any], origin: int) -> GgufTensor:
    shape, number, offset = header
    kind = GGMLQuantizationType(number)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    num_values = 1
    for size in shape:
        num_values *= size
    return GgufTensor(shape, kind, origin + offset, num_values // block * block_bytes)
