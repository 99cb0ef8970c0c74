"""Blocks' bytes into segments and out again, many at a time. Blocking."""

import os
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from services.kv_store.disk.blocks import BlockToRead, BlockToWrite, ReadResult
from services.kv_store.disk.layout import Spot, neighbours
from services.kv_store.disk.record import Record
from services.kv_store.disk.segment_files import Rows, SegmentFiles

Descriptors = Mapping[int, int | OSError]

SMALL_PIECE_BYTES = 128 << 10
"""Reads smaller than this are announced, so that the device works on several at once."""


def write_blocks(files: SegmentFiles, blocks: Sequence[BlockToWrite], spots: Sequence[Spot]) -> None:
    """All of one shape, each to its spot. Raises OSError; then some of it may be written."""
    for members in neighbours(spots):
        number, slot, form = spots[members[0]]
        for layer, rows in enumerate(zip(*[blocks[member].layers for member in members], strict=True)):
            files.write(number, form.offset_of(slot, layer), rows)


def read_blocks(
    files: SegmentFiles, blocks: Sequence[BlockToRead], records: Sequence[Record], layers: range
) -> list[ReadResult]:
    """Fill the rows with these layers of each block and prove them by the record's checksums.

    The loop runs once per layer and run of neighbours, what it maps and compares thousands of times a read.
    """
    spots = [record.spot for record in records]
    kept = [record.checksums[layers.start : layers.stop].tolist() for record in records]
    groups = neighbours(spots)
    results = [ReadResult.READ] * len(blocks)
    with files.reading({spot.segment: spot.form for spot in spots}) as fds:
        _announce(fds, [(spots[members[0]], len(members)) for members in groups], layers)
        for members in groups:
            number, slot, form = spots[members[0]]
            all_rows = zip(*[blocks[member].into for member in members], strict=True)
            all_kept = zip(*[kept[member] for member in members], strict=True)
            for layer, rows, expected in zip(layers, all_rows, all_kept, strict=True):
                if not _is_read(files, fds[number], form.offset_of(slot, layer), rows):
                    for member, row in zip(members, rows, strict=True):
                        _read_alone(files, fds[number], spots[member], layer, row, member, results)
                found = tuple(map(xxh3_64_intdigest, cast("tuple[bytes, ...]", rows)))
                if found != expected:
                    _mark_corrupt(results, members, found, expected)
    return results


def _announce(fds: Descriptors, runs: Sequence[tuple[Spot, int]], layers: range) -> None:
    if len(runs) * len(layers) < 2:
        return
    for (number, slot, form), num_slots in runs:
        fd, num_bytes = fds[number], num_slots * form.layer_bytes
        if num_bytes < SMALL_PIECE_BYTES and isinstance(fd, int):
            for layer in layers:
                os.posix_fadvise(fd, form.offset_of(slot, layer), num_bytes, os.POSIX_FADV_WILLNEED)


def _is_read(files: SegmentFiles, fd: int | OSError, offset: int, rows: Rows) -> bool:
    try:
        return isinstance(fd, int) and files.read(fd, offset, rows)
    except OSError:
        return False


def _read_alone(
    files: SegmentFiles,
    fd: int | OSError,
    spot: Spot,
    layer: int,
    row: NDArray[np.uint8],
    member: int,
    results: list[ReadResult],
) -> None:
    """One block's bad bytes deny nothing to its neighbours."""
    try:
        if not isinstance(fd, int):
            raise fd
        if not files.read(fd, spot.form.offset_of(spot.slot, layer), [row]):
            results[member] = ReadResult.MISSING
    except FileNotFoundError:
        results[member] = ReadResult.MISSING
    except OSError:
        results[member] = ReadResult.FAILED


def _mark_corrupt(
    results: list[ReadResult], members: Sequence[int], found: Sequence[int], expected: Sequence[int]
) -> None:
    for member, digest, wanted in zip(members, found, expected, strict=True):
        if digest != wanted and results[member] is ReadResult.READ:
            results[member] = ReadResult.CORRUPT
