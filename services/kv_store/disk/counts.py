"""What happened on disk, counted."""

from dataclasses import dataclass
from enum import StrEnum


class ReadResult(StrEnum):
    """How reading one block ended."""

    READ = "read"
    MISSING = "missing"
    """Not in the index, or its file is gone or too short."""
    CORRUPT = "corrupt"
    """Its bytes do not match their checksums."""
    FAILED = "failed"
    """The device or the system refused."""


@dataclass(slots=True)
class DiskCounts:
    """All only rise. Blocks, unless the name says otherwise."""

    num_written: int = 0
    num_read: int = 0
    num_missing: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    """Reads that ended with an error of the device or the system."""
    num_lost_at_open: int = 0
    """In the index, but not in the files; or not readable in the index."""
    num_write_errors: int = 0
    num_pauses: int = 0
    num_index_repairs: int = 0
