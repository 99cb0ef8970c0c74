import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv_store.disk.layout import Form, Spot
from services.kv_store.disk.record import Record, RecordUnreadable, decode_record, encode_record

u32 = st.integers(0, 2**32 - 1)


@st.composite
def records(draw: st.DrawFn) -> Record:
    checksums = draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40))
    form = Form(len(checksums), draw(st.integers(1, 2**32 - 1)), draw(st.integers(1, 32)))
    return Record(
        Spot(draw(u32), draw(u32), form),
        draw(st.binary(max_size=32)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.floats(0, 1e12)),
        draw(u32),
        np.array(checksums, np.uint64),
    )


def fields(record: Record) -> tuple[object, ...]:
    return (
        record.spot,
        record.parent,
        record.order,
        record.written_at_unix,
        record.num_hits,
        record.checksums.tolist(),
    )


@given(records())
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    body = encode_record(record)
    assert fields(decode_record(body)) == fields(record)
    assert fields(decode_record(body, with_checksums=False)) == (*fields(record)[:-1], [])


@given(records(), st.data())
def test_a_record_cut_short_or_longer_is_refused(record: Record, data: st.DataObject) -> None:
    body = encode_record(record)
    with pytest.raises(RecordUnreadable):
        decode_record(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(RecordUnreadable):
        decode_record(body + b"\0")


def test_another_format_is_refused_with_its_number() -> None:
    with pytest.raises(RecordUnreadable, match="format 63"):
        decode_record(b"c" * 100)
