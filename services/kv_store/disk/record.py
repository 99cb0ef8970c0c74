"""What the index keeps for a block, as bytes. Pure.

Little-endian: format and the parent's length (u8), layers and slots of a stripe (u16), bytes of a
layer, segment, slot, hits (u32), order of writing (u64), time of writing (f64), parent, and a
checksum (u64) per layer.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.kv_store.disk.layout import Form, Spot

FORMAT = 1
_NO_CHECKSUMS = np.empty(0, np.uint64)
_HEAD = struct.Struct("<BBHHIIIIQd")


class RecordUnreadable(Exception):
    """These bytes are no record of this version."""


class Record(NamedTuple):
    """`order` rises with every write, so that of two claims to a slot the later one is known."""

    spot: Spot
    parent: bytes
    order: int
    written_at_unix: float
    num_hits: int
    checksums: NDArray[np.uint64]


@lru_cache(maxsize=256)
def _form(num_layers: int, layer_bytes: int, stripe_slots: int) -> Form:
    """Millions of records share a few of them."""
    return Form(num_layers, layer_bytes, stripe_slots)


def encode_record(record: Record) -> bytes:
    """As the index keeps it."""
    head = _HEAD.pack(
        FORMAT,
        len(record.parent),
        record.spot.form.num_layers,
        record.spot.form.stripe_slots,
        record.spot.form.layer_bytes,
        record.spot.segment,
        record.spot.slot,
        record.num_hits,
        record.order,
        record.written_at_unix,
    )
    return head + record.parent + record.checksums.astype("<u8").tobytes()


def decode_record(body: bytes, *, with_checksums: bool = True) -> Record:
    """The inverse of `encode_record`, if wanted without the checksums. Raises RecordUnreadable."""
    if len(body) < _HEAD.size or body[0] != FORMAT:
        raise RecordUnreadable(f"{len(body)} bytes of format {body[:1].hex() or 'none'}, expected {FORMAT}")
    _, parent_bytes, num_layers, stripe_slots, layer_bytes, *numbers = _HEAD.unpack_from(body)
    segment, slot, num_hits, order, written_at = numbers
    checksums_at = _HEAD.size + parent_bytes
    if not num_layers or not layer_bytes or not stripe_slots or len(body) != checksums_at + 8 * num_layers:
        raise RecordUnreadable(f"{len(body)} bytes for {num_layers} layers of {layer_bytes} bytes")
    return Record(
        Spot(segment, slot, _form(num_layers, layer_bytes, stripe_slots)),
        body[_HEAD.size : checksums_at],
        order,
        written_at,
        num_hits,
        np.frombuffer(body, dtype="<u8", offset=checksums_at).astype(np.uint64, copy=False)
        if with_checksums
        else _NO_CHECKSUMS,
    )
