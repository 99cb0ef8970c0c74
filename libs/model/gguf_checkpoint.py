"""Weights of a GGUF file: names translated, numbers dequantised, q and k rows put back in their order."""

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from gguf import dequantize

from libs.model.checkpoint import TensorSpan
from libs.model.config import Architecture, ModelConfig
from libs.model.errors import UnsupportedModel
from libs.model.gguf_file import GgufFile

_WHOLE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NOT_WEIGHTS = ("rope_freqs.weight",)


class GgufCheckpoint:
    """A GGUF file of one of the supported families."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._names = {_hf_name(name): name for name in file.tensors if name not in _NOT_WEIGHTS}

    @property
    def spans(self) -> Mapping[str, TensorSpan]:
        """All tensors that are there."""
        return {
            hf_name: TensorSpan(
                self._file.path, tensor.start, tensor.num_bytes, tensor.kind.name, tensor.shape
            )
            for hf_name, tensor in (
                (hf_name, self._file.tensors[name]) for hf_name, name in self._names.items()
            )
        }

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised to float32.

        Raises:
            UnsupportedModel: the gguf package cannot dequantise its type.
        """
        place = self._file.tensors[self._names[name]]
        mapped = np.memmap(self._file.path, np.uint8, "r", place.start, (place.num_bytes,))
        try:
            # As a plain array: each of the many views that dequantising takes of a memmap costs Python code.
            rows = np.asarray(mapped).reshape(*place.shape[:-1], -1)
            values = dequantize(rows, place.kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensor {self._names[name]} is of type {place.kind.name}, which cannot be dequantised; "
                "use another quantisation of this model, such as Q8_0, Q4_K_M or F16"
            ) from error
        tensor = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
        return self._in_hf_order(name, tensor.view(place.shape))

    def _in_hf_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undoes the conversion's interleaving of q and k rows, which llama files are stored with.

        There each head's rows are pairs of (first half, second half); here rotation pairs the halves
        themselves.
        """
        if self._config.architecture is not Architecture.LLAMA:
            return tensor
        if ".q_proj." not in name and ".k_proj." not in name:
            return tensor
        heads = self._config.num_heads if ".q_proj." in name else self._config.num_kv_heads
        pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; unknown ones keep their own, and are then refused as left over."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _IN_LAYER.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        return name
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"
