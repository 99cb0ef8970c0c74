"""Messages as bytes, and the subjects they travel on."""

from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.errors import BusError, MessageTooLarge, NoResponders, Overloaded, Undecodable, error_named
from libs.bus.message import Message, check_presence_key, decode, encode, subject_of
from libs.bus.messages.generation import Abort, Place, Placed, Refused, TokenDelta, TokenFrame
from libs.bus.messages.presence import LoadReport
from libs.bus.messages.store import GroupTtls
from libs.request.outcome import RefusalReason

LIMIT_BYTES = 2**20


class Addressed(Message, frozen=True):
    subject: ClassVar[str] = "a.{to}.b"


def test_an_answer_of_several_kinds_comes_back_as_the_kind_it_was() -> None:
    for answer in (Placed(prefill="p", decode="d"), Refused(reason=next(iter(RefusalReason)))):
        assert decode(encode(answer, "subject", LIMIT_BYTES), Place.answer) == answer


@given(
    st.lists(
        st.builds(
            TokenDelta,
            request_id=st.text(max_size=20),
            index=st.integers(0, 2**31),
            token_ids=st.lists(st.integers(0, 2**31), max_size=8).map(tuple),
            detail=st.text(max_size=20),
        ),
        max_size=8,
    )
)
def test_a_token_frame_comes_back_as_it_was(deltas: list[TokenDelta]) -> None:
    frame = TokenFrame(worker="worker", deltas=deltas)
    assert decode(encode(frame, "subject", LIMIT_BYTES), TokenFrame) == frame


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_undecodable(payload: bytes) -> None:
    try:
        message = decode(payload, LoadReport)
    except Undecodable:
        return
    assert isinstance(message, LoadReport)


def test_a_message_of_another_type_is_undecodable() -> None:
    with pytest.raises(Undecodable, match="no Abort"):
        decode(encode(Placed(prefill="p", decode="d"), "subject", LIMIT_BYTES), Abort)


def test_fields_that_a_newer_peer_added_are_passed_over() -> None:
    payload = msgspec.msgpack.encode({"type": "abort", "request_id": "r", "new": 1})
    assert decode(payload, Abort) == Abort(request_id="r")


@given(size_bytes=st.integers(0, 300), limit_bytes=st.integers(16, 300))
def test_exactly_what_exceeds_the_limit_is_refused_with_both_sizes(size_bytes: int, limit_bytes: int) -> None:
    message = Abort(request_id="x" * size_bytes)
    encoded_bytes = len(msgspec.msgpack.encode(message))
    if encoded_bytes <= limit_bytes:
        assert len(encode(message, "subject", limit_bytes)) == encoded_bytes
    else:
        with pytest.raises(MessageTooLarge) as caught:
            encode(message, "subject", limit_bytes)
        assert (caught.value.size_bytes, caught.value.limit_bytes) == (encoded_bytes, limit_bytes)


def test_the_address_stands_in_the_subject() -> None:
    assert subject_of(Abort, "0af3-x_Y") == "kvmesh.worker.0af3-x_Y.abort"
    assert subject_of(Place, "") == "kvmesh.router.place"


@given(st.text(max_size=6))
def test_no_address_changes_the_shape_of_a_subject(address: str) -> None:
    try:
        subject = subject_of(Addressed, address)
    except ValueError:
        return
    assert subject.split(".") == ["a", address, "b"]
    assert subject.isascii()
    assert not set(subject) & set("*> \r\n\t")


@given(st.text(alphabet="aZ09_-.*> \n/é", max_size=6))
def test_a_key_that_passes_is_words_joined_by_dots(key: str) -> None:
    try:
        check_presence_key(key)
    except ValueError:
        return
    assert all(key.split("."))
    assert not set(key) & set("*> \n/é")


def test_errors_travel_by_name_and_unknown_ones_as_failed_handlers() -> None:
    assert type(error_named("Overloaded", "full")) is Overloaded
    assert type(error_named("NoResponders", "gone")) is NoResponders
    unknown = error_named("FromTheFuture", "what it said")
    assert isinstance(unknown, BusError)
    assert str(unknown) == "what it said"


@pytest.mark.parametrize("ttls", [{"rest_ttl_seconds": -1.0}, {"ttl_seconds": {b"a" * 16: -0.5}}])
def test_a_time_to_live_below_zero_is_not_understood(ttls: dict[str, object]) -> None:
    message = GroupTtls(epoch=1, **ttls)  # type: ignore[arg-type]  # kwargs of the test
    with pytest.raises(Undecodable):
        decode(encode(message, "subject", LIMIT_BYTES), GroupTtls)
