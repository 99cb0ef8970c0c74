"""What can go wrong with the whole tier. A single block that is gone or damaged is no error but a miss.

DiskTierError
    FolderUnusable   the folder cannot be made, written or read, or another process uses it
"""


class DiskTierError(Exception):
    """Of all errors here."""


class FolderUnusable(DiskTierError):
    """Nothing can be kept in this folder; says why and what to do."""
