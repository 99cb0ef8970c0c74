"""Messages between owner and host as frames of a Link.

A message is one of `protocol.Head`. Its arrays lie one after the other in the body, in the order of its
fields, each at a multiple of `ALIGNMENT_BYTES`; dtypes, shapes and the xxh3-64 of the whole body are in the
header. A body above `PIECE_BYTES` is cut: the frames that follow the first have no header.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from libs.kv.checksum import checksum
from libs.kv.tensors import bytes_of
from libs.transport.memory import Bytes
from libs.transport.port import Link, LinkError
from libs.worker.migration.protocol import Head

PIECE_BYTES = 4 << 20
MAX_BODY_BYTES = 1 << 30
"""A message that says it is larger is not taken in."""
ALIGNMENT_BYTES = 64

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)

Tensor = torch.Tensor | NDArray[Any]
S = TypeVar("S", bound=msgspec.Struct)


class BadFrame(Exception):
    """The peer sent what no owner or host sends, or something changed on its way; says what."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a body."""

    dtype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of a message's first frame."""

    head: msgspec.Raw
    """A `Head`; where it has an array, the array's place among `parts`."""
    parts: tuple[Part, ...] = ()
    num_bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True, eq=False)
class Message:
    """A message as it came in."""

    head: Head
    is_view: bool = False
    """Its arrays are views of the frame's memory: `owned` before that is released."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode(head: Head) -> tuple[bytes, Bytes]:
    """Header and body. A single contiguous tensor on the CPU is not copied: leave it unchanged."""
    found: list[Tensor] = []

    def place(array: Any) -> int:
        if not isinstance(array, torch.Tensor | np.ndarray):
            raise NotImplementedError(f"a {type(array).__name__} does not travel")
        found.append(array)
        return len(found) - 1

    raw = msgspec.Raw(msgspec.msgpack.encode(head, enc_hook=place))
    if not found:
        return _encoder.encode(Header(raw)), _NO_BYTES
    arrays = [_bytes_of(tensor) for tensor in found]
    body = arrays[0] if len(arrays) == 1 else _joined(arrays)
    parts = tuple(Part(dtype_name(tensor), tuple(tensor.shape)) for tensor in found)
    return _encoder.encode(Header(raw, parts, body.size, checksum(body))), body


def owned(struct: S) -> S:
    """The struct with arrays in memory of their own."""
    arrays = {
        name: value.clone() if isinstance(value, torch.Tensor) else value.copy()
        for name, value in asdict(struct).items()
        if isinstance(value, torch.Tensor | np.ndarray)
    }
    return replace(struct, **arrays)


def pieces(header: bytes, body: Bytes) -> Iterator[tuple[bytes, Bytes]]:
    """The frames that carry a message."""
    yield header, body[:PIECE_BYTES]
    for start in range(PIECE_BYTES, body.size, PIECE_BYTES):
        yield b"", body[start : start + PIECE_BYTES]


class Assembly:
    """Frames of one Link as messages again."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._body = _NO_BYTES
        self._num_taken = 0
        self._heads = msgspec.msgpack.Decoder(Head, dec_hook=self._array)
        self._arrays: Sequence[torch.Tensor] = ()
        self._num_placed = 0

    def take(self, header: bytes, body: Bytes) -> Message | None:
        """The message that this frame completes; None while more are to come. Raises BadFrame."""
        if self._header is None:
            first = _decoded(header)
            if body.size == first.num_bytes:
                return self._message(first, body, is_view=True)
            if body.size > first.num_bytes:
                raise BadFrame(f"a body of {body.size} bytes where {first.num_bytes} were announced")
            self._header, self._body = first, np.empty(first.num_bytes, dtype=np.uint8)
        elif header:
            raise BadFrame(f"a new message {self._num_taken} bytes into one of {self._body.size}")
        return self._add(self._header, body)

    def _add(self, header: Header, body: Bytes) -> Message | None:
        end = self._num_taken + body.size
        if not body.size or end > self._body.size:
            raise BadFrame(f"{end} bytes of a body for which {self._body.size} were announced")
        self._body[self._num_taken : end] = body
        self._num_taken = end
        if end < self._body.size:
            return None
        whole, self._header, self._body, self._num_taken = self._body, None, _NO_BYTES, 0
        return self._message(header, whole, is_view=False)

    def _message(self, header: Header, body: Bytes, *, is_view: bool) -> Message:
        if body.size and checksum(body) != header.checksum:
            raise BadFrame(f"a body of {body.size} bytes arrived with another checksum")
        try:
            self._arrays, self._num_placed = _tensors(header, body), 0
            head = self._heads.decode(header.head)
        except (msgspec.DecodeError, RuntimeError, TypeError, OverflowError) as error:
            raise BadFrame(f"arrays of shapes {[part.shape for part in header.parts]}: {error}") from error
        finally:
            num_arrays, self._arrays = len(self._arrays), ()  # they hold on to the frame's memory
        if self._num_placed != num_arrays:
            raise BadFrame(f"{type(head).__name__} with {num_arrays} arrays, not {self._num_placed}")
        return Message(head, is_view and bool(body.size))

    def _array(self, kind: type, place: object) -> Tensor:
        """The next array of the message, as its field has it."""
        if place != self._num_placed or self._num_placed >= len(self._arrays):
            raise ValueError(f"array {place} where {self._num_placed} of {len(self._arrays)} is due")
        self._num_placed += 1
        tensor = self._arrays[self._num_placed - 1]
        return tensor if kind is torch.Tensor else tensor.numpy()


def _decoded(header: bytes) -> Header:
    try:
        decoded = _decoder.decode(header)
    except msgspec.DecodeError as error:
        raise BadFrame(f"a header of {len(header)} bytes: {error}") from error
    if not 0 <= decoded.num_bytes <= MAX_BODY_BYTES:
        raise BadFrame(f"a body of {decoded.num_bytes} bytes; at most {MAX_BODY_BYTES} are taken")
    return decoded


def _tensors(header: Header, body: Bytes) -> tuple[torch.Tensor, ...]:
    tensors: list[torch.Tensor] = []
    end = 0
    for part in header.parts:
        start = _aligned(end)
        dtype = DTYPES.get(part.dtype)
        if dtype is None or any(size < 0 for size in part.shape):
            raise BadFrame(f"a tensor of dtype {part.dtype!r} and shape {part.shape}")
        end = start + prod(part.shape) * dtype.itemsize
        if end > body.size:
            raise BadFrame(f"tensors of {end} bytes in a body of {body.size}")
        if start == end:
            tensors.append(torch.empty(part.shape, dtype=dtype))
        else:
            tensors.append(torch.from_numpy(body[start:end]).view(dtype).view(part.shape))
    if end != body.size:
        raise BadFrame(f"tensors of {end} bytes in a body of {body.size}")
    return tuple(tensors)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _joined(arrays: Sequence[Bytes]) -> Bytes:
    starts: list[int] = []
    end = 0
    for array in arrays:
        starts.append(_aligned(end))
        end = starts[-1] + array.size
    body: Bytes = np.zeros(end, dtype=np.uint8) if end < PIECE_BYTES else np.empty(end, dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        body[start : start + array.size] = array
    return body


def _bytes_of(tensor: Tensor) -> Bytes:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return bytes_of(tensor)


def dtype_name(tensor: Tensor) -> str:
    """As in `DTYPES`."""
    return str(tensor.dtype) if isinstance(tensor, np.ndarray) else _NAMES[tensor.dtype]


class Outgoing:
    """Made on the Link's loop. Above `max_bytes` unsent there is no room: whoever heeds `when_room` waits.

    What is put on the loop's own thread goes to the Link at once, also while the loop does not run.
    """

    def __init__(self, link: Link, timeout_seconds: float, max_bytes: int = 0) -> None:
        self._link, self._timeout_seconds, self._max_bytes = link, timeout_seconds, max_bytes
        self._messages: deque[tuple[bytes, Bytes]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._await_room: list[Callable[[], None]] = []
        self._is_closed = self._is_posting = False
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def put(self, head: Head) -> bool:
        """Never waits. False after `close`: it goes nowhere."""
        header, body = encode(head)
        with self._lock:
            if self._is_closed:
                return False
            was_empty = not self._messages
            self._messages.append((header, body))
            self._num_bytes += body.size
        if threading.get_ident() == self._loop_thread:
            self._post_all()
        elif was_empty:  # else the loop has been told of the one before
            self._tell_loop()
        return not self._is_closed

    def when_room(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once: now if there is room, else when there is, or at `close`. From any thread."""
        with self._lock:
            if self._num_bytes > self._max_bytes and not self._is_closed:
                self._await_room.append(tell)
                return
        tell()

    def close(self) -> None:
        """Drop what is unsent; nobody waits any more."""
        with self._lock:
            self._is_closed = True
            self._messages.clear()
            self._num_bytes = 0
        self._tell_room()

    def _post_all(self) -> None:
        if self._is_posting:  # a message in pieces is under way further up: what came goes after it
            return
        self._is_posting = True
        try:
            while (message := self._next()) is not None:
                header, body = message
                parts = list(pieces(header, body))
                for part_header, part in parts[:-1]:
                    self._link.post(part_header, part, _ignore, timeout_seconds=self._timeout_seconds)
                done = partial(self._sent, body.size)
                self._link.post(*parts[-1], done, timeout_seconds=self._timeout_seconds)
        except LinkError:  # it is lost already, or what belongs together cannot be sent whole
            self.close()
            self._closing = self._loop.create_task(self._link.close())
        finally:
            self._is_posting = False

    def _next(self) -> tuple[bytes, Bytes] | None:
        with self._lock:
            return self._messages.popleft() if self._messages else None

    def _sent(self, num_bytes: int, error: LinkError | None) -> None:
        if error is not None:
            return  # who receives on the Link learns of it, and closes this
        with self._lock:
            if not self._is_closed:
                self._num_bytes -= num_bytes
        self._tell_room()

    def _tell_room(self) -> None:
        with self._lock:
            if self._num_bytes > self._max_bytes:
                return
            waiting, self._await_room = self._await_room, []
        for tell in waiting:
            tell()

    def _tell_loop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._post_all)
        except RuntimeError:  # the loop has ended, and with it the Link
            self.close()


def _ignore(_error: LinkError | None) -> None:
    """The last piece tells of them all."""
