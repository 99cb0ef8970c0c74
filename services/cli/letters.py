"""One letter and one colour for each worker, the same all over a picture."""

import re
from collections.abc import Iterable
from string import ascii_lowercase, ascii_uppercase

_LETTERS = ascii_uppercase + ascii_lowercase
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


class Letters:
    """By worker name, in the order in which people count: decode-2 before decode-10."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(set(names), key=_counted)
        self._at = {name: at for at, name in enumerate(ordered)}

    def letter(self, name: str) -> str:
        """A to Z, then a to z, then again."""
        return _LETTERS[self._at[name] % len(_LETTERS)]

    def colour(self, name: str) -> str:
        """As rich calls it."""
        return _COLOURS[self._at[name] % len(_COLOURS)]

    def names(self) -> list[str]:
        """All, in order."""
        return list(self._at)


def _counted(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]
