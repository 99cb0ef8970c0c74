"""Requests to replay, read from a file.

JSON lines with the fields of the Mooncake traces: `timestamp` (milliseconds), `input_length`, `output_length`
(tokens) and `hash_ids`, one for each block of the prompt, chained: equal ids mean equal prefixes. Ids are
numbers or hexadecimal block names; what a KV store records of its lookups is of this form, too. Lines that
are no request (without `input_length`) may stand between. Azure's CSV of lengths can be read as well.
Sources: Mooncake, FAST'25 release of traces; Azure Public Dataset, LLM inference traces of 2023.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import msgspec

from libs.kv.names import NAME_BYTES

MOONCAKE_BLOCK_SIZE = 512


class BadTrace(Exception):
    """A line is not what a trace consists of."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request as it came."""

    arrival_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    names: Sequence[bytes]
    """Of the prompt's blocks, the last one's perhaps a part of a block; 16 bytes each."""
    tenant: str = ""


class _Row(msgspec.Struct, frozen=True):
    timestamp: float = 0.0
    input_length: int | None = None
    hash_ids: list[int | str] = []
    output_length: int = 1
    tenant: str = ""


_decoder = msgspec.json.Decoder(_Row)


def read_trace(path: Path, *, speed_up: float = 1.0, max_requests: int | None = None) -> list[TraceRequest]:
    """Requests in order of arrival, the first at 0 s; arrivals `speed_up` times as dense as recorded.

    Raises BadTrace, which names the line, and OSError.
    """
    requests = sorted(_requests(path, max_requests), key=lambda request: request.arrival_seconds)
    if not requests:
        raise BadTrace(f"{path}: there is no request in it")
    start = requests[0].arrival_seconds
    return [
        msgspec.structs.replace(request, arrival_seconds=(request.arrival_seconds - start) / speed_up)
        for request in requests
    ]


def _requests(path: Path, max_requests: int | None) -> Iterator[TraceRequest]:
    read = _azure if path.suffix == ".csv" else _mooncake
    with path.open(newline="") as lines:
        yield from islice(read(lines, path), max_requests)


def _mooncake(lines: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            row = _decoder.decode(line) if line.strip() else _Row()
        except msgspec.DecodeError as error:
            raise BadTrace(f"{where}: {error}") from None
        if row.input_length is not None:
            names = [_name(block_id, where) for block_id in row.hash_ids]
            yield _request(row.timestamp / 1e3, row.input_length, row.output_length, names, row.tenant, where)


def _azure(lines: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        where = f"{path}:{number}"
        try:
            arrival = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
            num_input, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadTrace(f"{where}: {error!r}") from None
        yield _request(arrival, num_input, num_output, [], "", where)


def _request(
    arrival: float, num_input: int, num_output: int, names: list[bytes], tenant: str, where: str
) -> TraceRequest:
    if num_input < 1 or num_output < 0 or arrival < 0:
        raise BadTrace(
            f"{where}: a request has a prompt, and no negative figures: got {arrival} s, {num_input} tokens "
            f"in, {num_output} out"
        )
    return TraceRequest(arrival, num_input, max(1, num_output), names, tenant)


def _name(block_id: int | str, where: str) -> bytes:
    try:
        number = block_id if isinstance(block_id, int) else int(block_id, 16)
        return number.to_bytes(NAME_BYTES, "big")
    except (ValueError, OverflowError):
        raise BadTrace(
            f"{where}: hash_ids are numbers from 0 up or {NAME_BYTES} bytes in hexadecimal, got {block_id!r}"
        ) from None
