"""Requests to replay, read from a file.

JSON lines as KV stores record their lookups, which Mooncake's traces are, too: `hash_ids` has one id for each
block of a prompt, chained, so that equal ids mean equal prefixes. Azure's CSV of lengths is read as well.
Sources: Mooncake, FAST'25 release of traces; Azure Public Dataset, LLM inference traces of 2023.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import msgspec

from libs.kv.access_trace import TraceUnreadable, read_requests, rotated_files
from libs.kv.names import NAME_BYTES


class BadTrace(Exception):
    """What is read is no trace."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request as it came."""

    arrival_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    names: Sequence[bytes]
    """Of the prompt's blocks, the last one's perhaps a part of a block; 16 bytes each."""
    tenant: str = ""


def read_trace(
    paths: Sequence[Path], *, speed_up: float = 1.0, max_requests: int | None = None
) -> list[TraceRequest]:
    """Requests in order of arrival, the first at 0 s; arrivals `speed_up` times as dense as recorded.

    `paths`: one CSV, or JSON lines of all stores that recorded at the same time, of which the older files
    that were rotated away are read, too. Raises BadTrace and OSError.
    """
    is_csv = len(paths) == 1 and paths[0].suffix == ".csv"
    requests = list(islice(_azure(paths[0]) if is_csv else _accesses(paths), max_requests))
    if not requests:
        raise BadTrace(f"{_told(paths)}: there is no request in it")
    start = requests[0].arrival_seconds
    return [
        msgspec.structs.replace(request, arrival_seconds=(request.arrival_seconds - start) / speed_up)
        for request in requests
    ]


def check_blocks(requests: Iterable[TraceRequest], block_size: int) -> None:
    """Raises BadTrace where prompts do not have as many names as blocks of this size, full or begun."""
    for number, request in enumerate(requests, start=1):
        num_full, num_rest = divmod(request.num_input_tokens, block_size)
        num_names = len(request.names)
        if num_names and not num_full <= num_names <= num_full + bool(num_rest):
            raise BadTrace(
                f"request {number} has {num_names} block ids for {request.num_input_tokens} tokens: not "
                f"those of blocks of {block_size}. Say another block size, or name the traces of all stores"
            )


def _accesses(paths: Sequence[Path]) -> Iterator[TraceRequest]:
    try:
        traced = read_requests([file for path in paths for file in rotated_files(path) or [path]])
    except TraceUnreadable as error:
        raise BadTrace(str(error)) from None
    for number, request in enumerate(traced, start=1):
        where = f"{_told(paths)}: request {number} in order of time"
        names = [_name(block_id, where) for block_id in request.hash_ids]
        yield _request(
            request.timestamp / 1e3, request.input_length, request.output_length, names, request.tenant, where
        )


def _azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        where = f"{path}, line {number}"
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


def _told(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _name(block_id: int, where: str) -> bytes:
    try:
        return block_id.to_bytes(NAME_BYTES, "big")
    except OverflowError:
        raise BadTrace(
            f"{where}: hash_ids are numbers from 0 up, of at most {NAME_BYTES} bytes, got {block_id}"
        ) from None
