"""Blocks' bytes into segments and out again, many at a time. Blocking."""

import os
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from xxhash import xxh3_64_intdigest

from services.kv_store.disk.blocks import BlockToRead, BlockToWrite
from services.kv_store.disk.counts import ReadResult
from services.kv_store.disk.layout import Extent, Spot, extents_of
from services.kv_store.disk.record import Record
from services.kv_store.disk.segment_files import Rows, SegmentFiles

Descriptors = Mapping[int, int | OSError]

SMALL_EXTENT_BYTES = 128 << 10
"""Reads smaller than this are announced, so that the device works on several at once."""


def write_blocks(files: SegmentFiles, blocks: Sequence[BlockToWrite], spots: Sequence[Spot]) -> None:
    """All of one shape, each to its spot. Raises OSError; then some of it may be written."""
    num_layers, _ = blocks[0].shape
    for extent in extents_of(spots, range(num_layers)):
        rows = [blocks[member].layers[extent.layer] for member in extent.members]
        files.write(extent.segment, extent.offset, rows)


def read_blocks(
    files: SegmentFiles, blocks: Sequence[BlockToRead], records: Sequence[Record], layers: range
) -> list[ReadResult]:
    """Fill the rows with these layers of each block and prove them by the record's checksums.

    The loop runs once per layer and run of neighbours, what it maps and compares thousands of times a read.
    """
    if not blocks:
        return []
    spots = [record.spot for record in records]
    extents = list(extents_of(spots, layers))
    into = [block.into for block in blocks]
    kept: list[list[int]] = np.array([r.checksums[layers.start : layers.stop] for r in records]).T.tolist()
    results = [ReadResult.READ] * len(blocks)
    with files.reading({spot.segment: spot.form for spot in spots}) as fds:
        _announce(fds, extents)
        for extent in extents:
            row, members = extent.layer - layers.start, extent.members
            rows = [into[member][row] for member in members]
            if not _is_read(files, fds, extent, rows):
                _read_one_by_one(files, fds, extent, spots, rows, results)
            found = list(map(xxh3_64_intdigest, cast("list[bytes]", rows)))
            expected = [kept[row][member] for member in members]
            if found != expected:
                _mark_corrupt(results, members, found, expected)
    return results


def _announce(fds: Descriptors, extents: Sequence[Extent]) -> None:
    if len(extents) < 2:
        return
    for extent in extents:
        fd = fds[extent.segment]
        if extent.num_bytes < SMALL_EXTENT_BYTES and isinstance(fd, int):
            os.posix_fadvise(fd, extent.offset, extent.num_bytes, os.POSIX_FADV_WILLNEED)


def _is_read(files: SegmentFiles, fds: Descriptors, extent: Extent, rows: Rows) -> bool:
    fd = fds[extent.segment]
    try:
        return isinstance(fd, int) and files.read(fd, extent.offset, rows, extent.num_bytes)
    except OSError:
        return False


def _read_one_by_one(
    files: SegmentFiles,
    fds: Descriptors,
    extent: Extent,
    spots: Sequence[Spot],
    rows: Rows,
    results: list[ReadResult],
) -> None:
    """One block's bad bytes deny nothing to its neighbours."""
    fd = fds[extent.segment]
    for member, row in zip(extent.members, rows, strict=True):
        _, slot, form = spots[member]
        try:
            if not isinstance(fd, int):
                raise fd
            if not files.read(fd, form.offset_of(slot, extent.layer), [row], row.size):
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
