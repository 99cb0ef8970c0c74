"""Which blocks of an earlier life are held: those that index and files agree on. Pure."""

from collections.abc import Iterable, Mapping

from services.kv_store.disk.blocks import DiskBlock
from services.kv_store.disk.layout import Form
from services.kv_store.disk.record import Record


def reconcile(
    records: Iterable[tuple[bytes, Record | None]], files: Mapping[int, tuple[Form, int]], cap_bytes: int
) -> tuple[dict[int, dict[bytes, Record]], list[bytes]]:
    """The blocks held, by segment, and those that are lost. A block is held where its slot lies whole in a
    file of its form.

    Where more is held than `cap_bytes`, whole files go, those first that were written to longest ago.
    """
    held: dict[int, dict[bytes, Record]] = {}
    lost: list[bytes] = []
    for name, record in records:
        if record is None or not _fits(record, files):
            lost.append(name)
        else:
            held.setdefault(record.spot.segment, {})[name] = record
    last_write = {number: max(one.order for one in blocks.values()) for number, blocks in held.items()}
    room_bytes = cap_bytes
    for number in sorted(held, key=last_write.__getitem__, reverse=True):
        room_bytes -= files[number][1]
        if room_bytes < 0:
            lost += held.pop(number)
    return held, lost


def _fits(record: Record, files: Mapping[int, tuple[Form, int]]) -> bool:
    _, slot, form = record.spot
    file_form, file_bytes = files.get(record.spot.segment, (None, 0))
    return file_form == form and form.end_of(slot) <= file_bytes


def parents_first(held: Mapping[bytes, Record]) -> list[DiskBlock]:
    """In the order of writing, but each parent that is held before its children."""
    listed: dict[bytes, None] = {}
    for name in sorted(held, key=lambda name: held[name].order):
        chain: dict[bytes, None] = {}
        while name in held and name not in listed and name not in chain:
            chain[name] = None
            name = held[name].parent
        listed.update(dict.fromkeys(reversed(chain)))
    return [_block(name, held[name]) for name in listed]


def _block(name: bytes, record: Record) -> DiskBlock:
    return DiskBlock(name, record.parent, *record.spot.form.shape, record.written_at_unix, record.num_hits)
