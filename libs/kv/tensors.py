"""KV blocks as bytes and as tensors: the same memory, two views."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One block of one layer: K and V of `block_size` tokens, [num_kv_heads, 2, block_size, head_dim]."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.num_kv_heads * 2 * self.block_size * self.head_dim * self.dtype.itemsize

    def tensor_of(self, body: NDArray[np.uint8], num_blocks: int) -> torch.Tensor:
        """View received bytes as [num_blocks, num_kv_heads, 2, block_size, head_dim]; no copy.

        Raises ValueError where the bytes are not that many blocks.
        """
        if body.size != num_blocks * self.num_bytes:
            raise ValueError(f"{num_blocks} blocks take {num_blocks * self.num_bytes} bytes, got {body.size}")
        shape = (num_blocks, self.num_kv_heads, 2, self.block_size, self.head_dim)
        return torch.from_numpy(body).view(self.dtype).view(shape)

    def layers_of(self, body: NDArray[np.uint8], num_layers: int, num_blocks: int) -> torch.Tensor:
        """The same for layers one after another: [num_layers, num_blocks, ...]. Raises ValueError, too."""
        blocks = self.tensor_of(body, num_layers * num_blocks)
        return blocks.view(num_layers, num_blocks, *blocks.shape[1:])


def bytes_of(blocks: torch.Tensor) -> NDArray[np.uint8]:
    """View a contiguous tensor as its bytes, copied only where it is not on the CPU."""
    array: NDArray[np.uint8] = blocks.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return array
