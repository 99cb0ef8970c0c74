"""Bodies as memory: an address, a size, and the object that keeps it alive. Host arrays, host and CUDA
tensors."""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Memory:
    """`num_bytes` at `address`, valid as long as `owner` lives. `is_device`: only the device may touch it."""

    address: int
    num_bytes: int
    owner: object
    is_device: bool = False


NO_BODY = Memory(0, 0, None)


class TensorLike(Protocol):
    """What is asked of a torch tensor; torch itself is imported only by those who have one."""

    is_cuda: bool

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def is_contiguous(self) -> bool:
        """Whether the elements lie in order without gaps."""
        ...

    def numel(self) -> int:
        """Number of elements."""
        ...

    def element_size(self) -> int:
        """Bytes of one element."""
        ...


def _is_array(body: object) -> TypeGuard[NDArray[Any]]:
    return isinstance(body, np.ndarray)


def as_memory(body: "Bytes | Memory | TensorLike") -> Memory:
    """The memory of an array or tensor of any dtype, not copied. Raises ValueError when it is not
    contiguous."""
    if isinstance(body, Memory):
        return body
    if _is_array(body):
        if not body.flags.c_contiguous:
            raise ValueError(f"a body must be C-contiguous; this array has strides {body.strides}")
        return Memory(body.__array_interface__["data"][0], body.nbytes, body)
    if hasattr(body, "data_ptr"):  # isinstance on a Protocol costs 8 us
        tensor = cast("TensorLike", body)
        if not tensor.is_contiguous():
            raise ValueError("a body must be contiguous; call .contiguous() on the tensor first")
        return Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor, tensor.is_cuda)
    raise ValueError(f"a body is a numpy array, a torch tensor or Memory, not {type(body).__name__}")


def own_copy(body: bytes) -> Memory:
    """A writable copy."""
    return as_memory(np.frombuffer(bytearray(body), dtype=np.uint8)) if body else NO_BODY


def view(memory: Memory) -> Bytes:
    """Host memory as an array. The array keeps `memory.owner` alive."""
    if memory.is_device:
        raise ValueError("device memory has no host view; copy it with copy_to_host")
    if _is_array(memory.owner) and memory.owner.nbytes == memory.num_bytes and memory.owner.dtype == np.uint8:
        return memory.owner
    return np.asarray(_ArrayInterface(memory))


class _ArrayInterface:
    """numpy's protocol for foreign memory: the array made of it keeps this object, and so the owner,
    alive."""

    def __init__(self, memory: Memory) -> None:
        self._owner = memory.owner
        self.__array_interface__ = {
            "data": (memory.address, False),
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def copy_to_host(memory: Memory, out: Bytes, *, first_byte: int = 0) -> None:
    """Fill `out` with the bytes of `memory` from `first_byte` on."""
    if memory.is_device:
        import torch

        flat = cast("torch.Tensor", memory.owner).view(-1).view(torch.uint8)
        torch.from_numpy(out).copy_(flat[first_byte : first_byte + out.nbytes])
    elif out.nbytes:
        ctypes.memmove(out.__array_interface__["data"][0], memory.address + first_byte, out.nbytes)
