"""What is asked of a store and put into it, one JSON object per line, in the fields of Mooncake's traces
(`timestamp` in ms, `input_length`, `output_length`, `hash_ids`) and some of ours. Pure but for reading files.

A line is what one store saw. `read_requests` joins the lines of a request into what a simulator or a load
test replays.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

HASH_ID_BYTES = 6
"""Of a block's name: exact also for readers whose numbers are doubles."""


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One access."""

    timestamp: float
    """Milliseconds, unix time in our own traces, so that those of several stores can be joined."""
    input_length: int = 0
    """Tokens of the whole prompt; 0 where unknown."""
    output_length: int = 0
    hash_ids: tuple[int, ...] = ()
    """Blocks, in the order of the prompt. Mooncake's name for them."""
    run_starts: tuple[int, ...] = ()
    """Where in the prompt each run of these blocks begins; empty: not told."""
    run_lengths: tuple[int, ...] = ()
    """Blocks of each run; as many as `run_starts`."""
    kind: Literal["lookup", "put"] = "lookup"
    num_memory_hits: int = 0
    num_disk_hits: int = 0
    group: str = ""
    """Name of the block whose subtree the access fell into, in hex; empty where it has no TTL of its own."""
    tenant: str = ""
    request_id: str = ""


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as a replay needs it."""

    timestamp: float
    """Milliseconds after the first request."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    tenant: str = ""


class TraceUnreadable(Exception):
    """A line that is no access."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TraceLine)


def hash_ids(names: Sequence[bytes]) -> tuple[int, ...]:
    """What a trace calls these blocks."""
    return tuple(int.from_bytes(name[:HASH_ID_BYTES], "little") for name in names)


def encode_line(line: TraceLine) -> bytes:
    """With its line end. Mooncake's four fields are always there."""
    record = msgspec.to_builtins(line)
    for field in ("input_length", "output_length", "hash_ids"):
        record.setdefault(field, getattr(line, field))
    return _encoder.encode(record) + b"\n"


def read_lines(paths: Iterable[Path]) -> Iterator[TraceLine]:
    """Lines of these files in order; Mooncake's own traces are read as lookups. A line cut short at the end
    of a file, as a crash leaves it, is passed over. Raises TraceUnreadable for any other."""
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield _decoder.decode(line)
                except msgspec.DecodeError as error:
                    if line.endswith(b"\n"):
                        raise TraceUnreadable(f"{path}, line {number}: {error}") from error


def rotated_files(path: Path) -> list[Path]:
    """The trace and what was rotated away from it, the oldest first."""
    numbered = [p for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdigit()]
    return [*sorted(numbered, key=lambda p: -int(p.suffix[1:])), *([path] if path.exists() else [])]


class _Blocks:
    """All blocks of one request, each with its position in the prompt, as far as every lookup told it."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        self._are_told = True

    def add(self, line: TraceLine) -> None:
        runs = zip(line.run_starts, line.run_lengths, strict=False)
        positions = [start + offset for start, length in runs for offset in range(length)]
        if len(positions) != len(line.hash_ids):
            self._are_told, positions = False, [0] * len(line.hash_ids)
        for block, position in zip(line.hash_ids, positions, strict=True):
            self._positions.setdefault(block, position)

    def in_order(self) -> tuple[int, ...]:
        if not self._are_told:
            return tuple(self._positions)
        return tuple(sorted(self._positions, key=self._positions.__getitem__))


def read_requests(paths: Iterable[Path]) -> list[TracedRequest]:
    """Requests in order of their first lookup. The lookups of a request at several stores count as one, with
    all its blocks in the order of its prompt, or as the files have them where a lookup does not tell it; its
    output's length comes with the put of its last blocks. Lookups without a request id, as Mooncake's, are
    requests of their own."""
    first: dict[str, TraceLine] = {}
    blocks: dict[str, _Blocks] = {}
    outputs: dict[str, int] = {}
    for number, line in enumerate(read_lines(paths)):
        key = line.request_id or f"#{number}"
        if line.kind == "lookup":
            if key not in first or line.timestamp < first[key].timestamp:
                first[key] = line
            blocks.setdefault(key, _Blocks()).add(line)
        outputs[key] = max(outputs.get(key, 0), line.output_length)
    begun = min((line.timestamp for line in first.values()), default=0.0)
    requests = [
        TracedRequest(
            timestamp=line.timestamp - begun,
            input_length=line.input_length,
            output_length=outputs[key],
            hash_ids=blocks[key].in_order(),
            tenant=line.tenant,
        )
        for key, line in first.items()
    ]
    return sorted(requests, key=lambda request: request.timestamp)
