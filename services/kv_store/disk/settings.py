"""Settings of the tier on disk, as the store passes them on."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FsyncPolicy = Literal["off", "interval", "always"]

SMALLEST_CAP_BYTES = 32 << 20


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`off` leaves flushing to the system: a crash of the process loses nothing, one of the machine loses
    what the system had not written yet. `interval` bounds that time, `always` ends it."""

    cap_bytes: Annotated[int, Meta(ge=SMALLEST_CAP_BYTES)]
    fsync: FsyncPolicy = "interval"
    fsync_interval_seconds: Annotated[float, Meta(gt=0)] = 5.0
    retry_seconds: Annotated[float, Meta(gt=0)] = 2.0
    """After a failed write, how often to look whether writing works again."""
    index_folder: Path | None = None
    """Where RocksDB lies; None: beside the blocks."""
    index_cache_bytes: Annotated[int, Meta(ge=1 << 20)] = 32 << 20
    index_write_buffer_bytes: Annotated[int, Meta(ge=64 << 10)] = 4 << 20
    segment_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of a segment file; 0: by the cap."""
    num_read_threads: Annotated[int, Meta(ge=1)] = 2
    max_pending_write_bytes: Annotated[int, Meta(gt=0)] = 256 << 20
    """Writes beyond these are refused until earlier ones are done."""

    @property
    def segment_file_bytes(self) -> int:
        """Few enough files that all stay open, and small enough that a freed one gives room soon."""
        return self.segment_bytes or max(self.cap_bytes // 256, min(64 << 20, self.cap_bytes // 16))

    @property
    def probe_bytes(self) -> int:
        """What must fit again before writing is tried after a failure."""
        return min(16 << 20, self.cap_bytes // 64)

    @property
    def write_buffer_bytes(self) -> int:
        """RocksDB's own files stay a small part of the cap."""
        return max(64 << 10, min(self.index_write_buffer_bytes, self.cap_bytes // 256))
