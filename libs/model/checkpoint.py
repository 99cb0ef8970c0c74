"""Where weights come from: tensors by their Hugging Face names, one at a time, whatever the files are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


class Checkpoint(Protocol):
    """A model's weights on disk. Nothing is read before `read`, and nothing is kept after it."""

    @property
    def spans(self) -> "Mapping[str, TensorSpan]":
        """All tensors that are there, by Hugging Face name."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU in a floating dtype; read-only, it may lie in the file's memory."""
        ...


@dataclass(frozen=True)
class TensorSpan:
    """Where the bytes of one tensor lie, and what they encode."""

    path: Path
    start: int
    num_bytes: int
    encoding: str
    shape: tuple[int, ...]
