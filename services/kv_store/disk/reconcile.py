"""What a restart makes of an index and files that may not match. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.kv_store.disk.blocks import DiskBlock
from services.kv_store.disk.layout import Form, Place
from services.kv_store.disk.record import Record


@dataclass(slots=True)
class Found:
    """`held` can be read, as far as one can tell; `lost` cannot; `unused` files hold nothing."""

    held: dict[bytes, Record] = field(default_factory=dict[bytes, Record])
    lost: list[bytes] = field(default_factory=list[bytes])
    unused: dict[int, Form] = field(default_factory=dict[int, Form])

    def slots(self) -> dict[int, tuple[Form, set[int]]]:
        """The form and taken slots of every segment with a block."""
        taken: dict[int, tuple[Form, set[int]]] = {}
        for record in self.held.values():
            taken.setdefault(record.spot.segment, (record.spot.form, set()))[1].add(record.spot.slot)
        return taken

    def lose(self, segment: int) -> None:
        """None of this segment's blocks can be read."""
        gone = [name for name, record in self.held.items() if record.spot.segment == segment]
        for name in gone:
            del self.held[name]
        self.lost += gone


def reconcile(
    records: Iterable[tuple[bytes, Record | None]], files: Mapping[int, tuple[Form, int]], cap_bytes: int
) -> Found:
    """A block is held where its slot lies whole in a file of its form and no later block claims the slot.

    Where more is held than `cap_bytes`, whole files go, those first that were written to longest ago.
    """
    found = Found()
    owners: dict[Place, bytes] = {}
    for name, record in records:
        if record is None or not _fits(record, files):
            found.lost.append(name)
            continue
        place = record.spot.segment, record.spot.slot
        rival = owners.get(place)
        if rival is not None and found.held[rival].order > record.order:
            found.lost.append(name)
            continue
        if rival is not None:
            del found.held[rival]
            found.lost.append(rival)
        owners[place] = name
        found.held[name] = record
    _shrink(found, files, cap_bytes)
    kept = {record.spot.segment for record in found.held.values()}
    found.unused = {number: form for number, (form, _) in files.items() if number not in kept}
    return found


def _fits(record: Record, files: Mapping[int, tuple[Form, int]]) -> bool:
    _, slot, form = record.spot
    file_form, file_bytes = files.get(record.spot.segment, (None, 0))
    return file_form == form and form.end_of(slot) <= file_bytes


def _shrink(found: Found, files: Mapping[int, tuple[Form, int]], cap_bytes: int) -> None:
    last_write: dict[int, int] = {}
    for record in found.held.values():
        last_write[record.spot.segment] = max(record.order, last_write.get(record.spot.segment, 0))
    excess_bytes = sum(files[number][1] for number in last_write) - cap_bytes
    gone: set[int] = set()
    for number in sorted(last_write, key=last_write.__getitem__):
        if excess_bytes <= 0:
            break
        gone.add(number)
        excess_bytes -= files[number][1]
    names = [name for name, record in found.held.items() if record.spot.segment in gone] if gone else []
    for name in names:
        del found.held[name]
    found.lost += names


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
