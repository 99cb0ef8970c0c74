"""Calls between home and host survive the trip, or what damaged them is noticed."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.hosting.calls import (
    Attend,
    AttendLent,
    BeginStep,
    HostedCall,
    MoveBlocks,
    ReadBlocks,
    RunLayers,
    Settle,
    WriteBlocks,
)
from libs.kv.checksum import checksum
from libs.transport.port import MAX_HEADER_BYTES
from libs.worker.migration import framing
from libs.worker.migration.framing import Assembly, BadFrame, Message, encode, owned, pieces
from libs.worker.migration.protocol import Call, Head, Ping, Result

_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
_SIZES = st.integers(0, 5)
_LAYER = st.none() | st.integers(0, 90)
_IDS = st.text("abcdef-0123456789", min_size=1, max_size=40)


@st.composite
def tensors(draw: st.DrawFn, num_dims: int) -> torch.Tensor:
    shape = [draw(_SIZES) for _ in range(num_dims)]
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(shape, generator=numbers).to(draw(_DTYPES))


@st.composite
def id_arrays(draw: st.DrawFn, dtype: Any = np.int64) -> Any:
    return np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=6)), dtype=dtype)


@st.composite
def steps(draw: st.DrawFn) -> BeginStep:
    tables = draw(id_arrays(np.int32))
    return BeginStep(
        positions=draw(id_arrays()),
        slots=draw(id_arrays()),
        block_tables=tables.reshape(1, -1),
        context_lens=draw(id_arrays(np.int32)),
        query_starts=draw(id_arrays(np.int32)),
        max_query_len=draw(st.integers(1, 4096)),
        max_context_len=draw(st.integers(1, 2**20)),
        last_tokens=draw(st.none() | id_arrays()),
    )


_CALLS: st.SearchStrategy[HostedCall] = st.one_of(
    steps(),
    st.builds(RunLayers, _IDS, tensors(2)),
    st.builds(Attend, _IDS, st.integers(0, 90), tensors(3), tensors(3), tensors(3)),
    st.builds(AttendLent, _IDS, st.integers(0, 90), st.integers(0, 9), tensors(3), tensors(3), tensors(3)),
    st.builds(WriteBlocks, _IDS, _LAYER, id_arrays(), tensors(5)),
    st.builds(ReadBlocks, _IDS, _LAYER, id_arrays()),
    st.builds(MoveBlocks, id_arrays().map(lambda ids: np.stack([ids, ids]))),
    st.builds(Settle),
)


def take_all(head: Head) -> Message:
    assembly, message = Assembly(), None
    for header, body in pieces(*encode(head)):
        assert message is None, "complete before its last frame"
        assert len(header) <= MAX_HEADER_BYTES
        message = assembly.take(header, body.copy())
    assert message is not None
    return message


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


@given(_CALLS, st.integers(1, 300))
def test_any_call_survives_the_trip_however_it_is_cut(call: HostedCall, piece_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(framing, "PIECE_BYTES", piece_bytes)
        came = take_all(Call(call_id=7, call=call))
    assert isinstance(came.head, Call)
    back = came.head.call
    assert type(back) is type(call)
    assert all(same(getattr(call, name), getattr(back, name)) for name in call.__struct_fields__)


@given(st.data())
def test_a_changed_byte_of_a_body_is_noticed(data: st.DataObject) -> None:
    header, body = encode(Result(call_id=1, tensor=torch.arange(50, dtype=torch.float32)))
    changed = body.copy()
    changed[data.draw(st.integers(0, body.size - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadFrame, match="another checksum"):
        Assembly().take(header, changed)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_garbage_is_refused_and_breaks_nothing(header: bytes, body: bytes) -> None:
    with pytest.raises(BadFrame):
        Assembly().take(header, np.frombuffer(body, dtype=np.uint8).copy())


def test_a_single_tensor_is_not_copied_on_its_way_out() -> None:
    hidden = torch.randn(4, 8)
    _, body = encode(Result(call_id=1, tensor=hidden))
    assert body.__array_interface__["data"][0] == hidden.data_ptr()


def test_a_message_that_came_in_one_frame_is_a_view_until_it_is_owned() -> None:
    header, body = encode(Result(call_id=1, tensor=torch.ones(3)))
    message = Assembly().take(header, memory := body.copy())
    assert message is not None
    assert message.is_view
    assert isinstance(message.head, Result)
    kept = owned(message.head)
    memory[:] = 0
    assert torch.equal(kept.tensor, torch.ones(3))
    assert torch.equal(message.head.tensor, torch.zeros(3))


def test_a_new_message_within_one_that_is_not_complete_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "PIECE_BYTES", 16)
    first = next(iter(pieces(*encode(Result(call_id=1, tensor=torch.ones(30))))))
    assembly = Assembly()
    assert assembly.take(*first) is None
    with pytest.raises(BadFrame, match="a new message"):
        assembly.take(*encode(Ping()))


def header_of(head: Any, **facts: Any) -> bytes:
    raw = msgspec.Raw(msgspec.msgpack.encode(head))
    return msgspec.msgpack.encode(framing.Header(raw, **facts))


RESULT = {"type": "result", "call_id": 1, "tensor": 0}


@pytest.mark.parametrize(
    ("parts", "num_bytes"),
    [
        ((framing.Part("float64", (1,)),), 8),
        ((framing.Part("float32", (-1,)),), 0),
        ((framing.Part("float32", (1 << 40,)),), 4),
        ((framing.Part("float32", (1,)),), 8),
        ((), 4),
    ],
)
def test_tensors_that_are_not_the_body_are_refused(parts: tuple[framing.Part, ...], num_bytes: int) -> None:
    body = np.zeros(num_bytes, dtype=np.uint8)
    whole = checksum(body)
    with pytest.raises(BadFrame):
        Assembly().take(header_of(RESULT, parts=parts, num_bytes=num_bytes, checksum=whole), body)


def test_a_body_that_claims_to_be_huge_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(BadFrame, match="at most"):
        Assembly().take(header_of(Ping(), num_bytes=1 << 50), np.zeros(1, dtype=np.uint8))


@pytest.mark.parametrize(
    ("head", "num_arrays"),
    [
        ({"type": "call", "call_id": 1, "call": {"type": "settle"}}, 1),
        (
            {
                "type": "call",
                "call_id": 0,
                "call": {"type": "write", "move_id": "m", "layer": 0, "blocks": 0},
            },
            1,
        ),
        ({**RESULT, "tensor": 1}, 2),
        ({**RESULT, "tensor": 0}, 2),
        ({**RESULT, "tensor": 0}, 0),
        ({**RESULT, "tensor": -1}, 1),
        ({**RESULT, "tensor": "0"}, 1),
    ],
)
def test_messages_with_other_arrays_than_they_have_are_refused(head: Any, num_arrays: int) -> None:
    parts = (framing.Part("uint8", (64,)),) * num_arrays
    body = np.zeros(64 * num_arrays, dtype=np.uint8)
    header = header_of(head, parts=parts, num_bytes=body.size, checksum=checksum(body))
    with pytest.raises(BadFrame):
        Assembly().take(header, body)


def test_an_array_of_a_dtype_that_its_field_cannot_hold_is_refused() -> None:
    header, body = encode(Call(call_id=1, call=ReadBlocks("m", None, torch.ones(1, dtype=torch.bfloat16))))
    with pytest.raises(BadFrame):
        Assembly().take(header, body)
