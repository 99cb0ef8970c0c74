"""Layers read again from the files that a model was loaded from."""

import ctypes
from pathlib import Path

import torch
from safetensors import SafetensorError

from libs.model.assemble import assemble_layers
from libs.model.checkpoint import Checkpoint
from libs.model.config import ModelConfig
from libs.model.errors import BrokenModel, SourceChanged
from libs.model.fingerprint import fingerprint
from libs.model.gguf_checkpoint import GgufCheckpoint
from libs.model.gguf_file import GgufFile, with_header
from libs.model.layer import Layer
from libs.model.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(source: Path | GgufFile, config: ModelConfig) -> Checkpoint:
    """The weights of the GGUF file (or its header) or Hugging Face directory `source`.

    Raises:
        BrokenModel: the files are missing or damaged.
    """
    files = with_header(source)
    return GgufCheckpoint(files, config) if isinstance(files, GgufFile) else SafetensorsCheckpoint(files)


class LayerFiles:
    """A GGUF file or a Hugging Face directory, opened anew for each reading.

    Nothing of the files stays open or mapped between.
    """

    def __init__(
        self, source: Path, config: ModelConfig, name: str, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._config = config
        self._fingerprint = name
        self._dtype = dtype
        self._device = device

    def read_layers(self, layers: range) -> dict[int, Layer]:
        """These layers, bit for bit as they were first read; for any thread.

        The fingerprint is taken before and after, so layers of files that are replaced meanwhile are refused
        too. Headers, whose vocabulary takes as long as some layers, are read once.

        Raises:
            SourceChanged: what is there now would give other weights, or nothing is.
        """
        try:
            checkpoint = self._opened()
            self._check(checkpoint)
            found = assemble_layers(self._config, checkpoint, layers, dtype=self._dtype, device=self._device)
            result = dict(found)
            self._check(checkpoint)
        except (BrokenModel, OSError, ValueError, SafetensorError) as error:  # ValueError: a map past the end
            raise SourceChanged(
                f"the weights in {self._source} cannot be read again: {error}; put the files back"
            ) from error
        give_back_freed_memory()  # what packing needed
        return result

    def _opened(self) -> Checkpoint:
        if not self._source.exists():
            raise SourceChanged(f"{self._source} is gone, and with it the weights; put it back")
        return open_checkpoint(self._source, self._config)

    def _check(self, checkpoint: Checkpoint) -> None:
        """What lies where its tensors are must still be the weights of the model."""
        name = fingerprint(self._config, checkpoint.spans, str(self._dtype).removeprefix("torch."))
        if name != self._fingerprint:
            raise SourceChanged(
                f"{self._source} holds other weights than those loaded from it (fingerprint {name}, was "
                f"{self._fingerprint}); put the old files back, or restart with the new ones"
            )


def give_back_freed_memory() -> bool:
    """Returns what malloc keeps for reuse after weights were dropped; whether this machine's libc can.

    glibc keeps freed blocks of some MB in its heap, so without this a process that gave layers away stays as
    large as before. It takes a few milliseconds, in which other threads may wait for memory: call it in a
    thread of its own.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
