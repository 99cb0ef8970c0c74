"""Loads a model from a Hugging Face directory or a GGUF file."""

from pathlib import Path

import torch

from libs.model.assemble import OnProgress, assemble
from libs.model.config import within_sliding_window
from libs.model.errors import UnsupportedModel
from libs.model.fingerprint import fingerprint
from libs.model.gguf_config import gguf_config
from libs.model.gguf_file import GgufFile, with_header
from libs.model.hf_config import read_hf_config
from libs.model.layer_files import LayerFiles, give_back_freed_memory, open_checkpoint
from libs.model.model import Model
from libs.model.source import find_model

__all__ = ["find_model", "load_model"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    source: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
    max_model_len: int | None = None,
) -> Model:
    """The model that lies at `source` (a path from `find_model`), in `dtype` on `device`.

    `on_progress` gets the fraction of the weights' bytes that is loaded, after each tensor. `max_model_len`
    tells how long sequences may become, which lets models with a sliding window be served below it.

    Raises:
        UnsupportedModel, BrokenModel: with what to do about it.
    """
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"dtype {dtype} is not supported; use one of {', '.join(map(str, _DTYPES))}")
    source = source.absolute()  # layers may be read again after the working directory changed
    opened = with_header(source)
    read = gguf_config(opened) if isinstance(opened, GgufFile) else read_hf_config(opened)
    config = within_sliding_window(read, max_model_len)
    checkpoint = open_checkpoint(opened, config)
    weights = assemble(config, checkpoint, dtype=dtype, device=torch.device(device), on_progress=on_progress)
    name = fingerprint(config, checkpoint.spans, str(dtype).removeprefix("torch."))
    files = LayerFiles(source, config, name, dtype=dtype, device=torch.device(device))
    give_back_freed_memory()  # what packing needed
    return Model(config, weights, fingerprint=name, read_layers=files.read_layers)
