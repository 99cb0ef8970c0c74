"""Bodies: arrays and tensors as addresses that keep their owner alive."""

import subprocess
import sys

import numpy as np
import pytest

from libs.transport.memory import Memory, as_memory, copy_to_host, own_copy, view


def test_an_array_of_any_dtype_is_its_bytes_and_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    memory = as_memory(array)
    assert memory.num_bytes == 24
    assert memory.owner is array
    view(memory)[:4] = 0xFF
    assert np.isnan(array[0, 0])


def test_a_tensor_of_any_dtype_is_its_bytes_and_is_not_copied() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(8, dtype=torch.bfloat16)
    memory = as_memory(tensor)
    assert (memory.num_bytes, memory.owner is tensor, memory.is_device) == (16, True, False)
    assert view(memory).tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_what_has_gaps_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="C-contiguous"):
        as_memory(np.zeros((4, 4))[:, :2])
    with pytest.raises(ValueError, match="contiguous"):
        as_memory(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="not list"):
        as_memory([1, 2])  # type: ignore[arg-type]


def test_a_view_keeps_the_owner_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.array = np.full(100, 7, dtype=np.uint8)

    owner = Owner()
    body = view(Memory(owner.array.ctypes.data, 100, owner))
    del owner
    assert body.sum() == 700


def test_device_memory_has_no_host_view() -> None:
    with pytest.raises(ValueError, match="copy_to_host"):
        view(Memory(4096, 10, None, is_device=True))


def test_a_part_of_the_memory_is_copied() -> None:
    out = np.zeros(3, dtype=np.uint8)
    copy_to_host(as_memory(np.arange(10, dtype=np.uint8)), out, first_byte=4)
    assert out.tolist() == [4, 5, 6]


def test_an_own_copy_is_writable_and_empty_for_nothing() -> None:
    assert own_copy(b"").num_bytes == 0
    body = view(own_copy(b"abc"))
    body[0] = ord("x")
    assert body.tobytes() == b"xbc"


def test_transports_do_not_import_torch() -> None:
    modules = "libs.transport.choose, libs.transport.shm, libs.transport.ucx.transport, libs.transport.memory"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
