"""What commands draw with."""

from rich.console import Console

_GIB, _MIB = 1 << 30, 1 << 20


class ReadConsole(Console):
    """Where its reader has gone it says so as a stream does; rich's own would end the program with 1."""

    def on_broken_pipe(self) -> None:
        """Called where a BrokenPipeError is handled."""
        raise BrokenPipeError


def size_words(num_bytes: int) -> str:
    """In GiB or MiB."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
