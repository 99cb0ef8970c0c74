"""The console that commands draw on."""

from rich.console import Console


class ReadConsole(Console):
    """Where its reader has gone it says so as a stream does; rich's own would end the program with 1."""

    def on_broken_pipe(self) -> None:
        """Called where a BrokenPipeError is handled."""
        raise BrokenPipeError
