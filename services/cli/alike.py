"""Lines that are alike but for their figures, told as one. Pure."""

import re
from collections.abc import Sequence

_FIGURE = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w-]|\.\d)")
"""Not the number in a name, as in decode-0, nor of layers, as in 20-29."""


def shape_of(line: str) -> str:
    """The line without its figures."""
    return _FIGURE.sub("#", line)


def as_one(lines: Sequence[str]) -> str:
    """Lines of one shape; a figure in which they differ becomes its range: `cost 0.05 to 0.31`."""
    columns = iter(list(zip(*(_FIGURE.findall(line) for line in lines), strict=True)))

    def told(_: re.Match[str]) -> str:
        figures = sorted(next(columns), key=float)
        least, greatest = figures[0], figures[-1]
        return least if float(least) == float(greatest) else f"{least} to {greatest}"

    return _FIGURE.sub(told, lines[0])
