"""One measured number, what it is compared with, and what it should be."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

Say = Callable[[str], None]
"""Shows what is measured now."""


@dataclass(frozen=True)
class Figure:
    """`reference` was measured in the same run, so `ratio` holds even where the machine is noisy."""

    name: str
    value: float
    unit: str
    reference: float | None = None
    reference_name: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over reference."""
        return self.value / self.reference if self.reference else None

    @property
    def met(self) -> bool | None:
        """Whether the aim was reached; None where there is none."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclass(frozen=True)
class Section:
    """Figures that are measured together."""

    name: str
    title: str
    measure: Callable[[Say], list[Figure]]


def as_record(figure: Figure) -> dict[str, Any]:
    """For the JSON report."""
    return asdict(figure) | {"ratio": figure.ratio, "met": figure.met}


def as_table(title: str, figures: list[Figure]) -> Table:
    """For the terminal."""
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "unit", "against", "ratio", "aim", ""):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for figure in figures:
        aim = f">= {figure.at_least:g}" if figure.at_least is not None else ""
        aim = f"<= {figure.at_most:g}" if figure.at_most is not None else aim
        against = f"{figure.reference_name} {figure.reference:.4g}" if figure.reference is not None else ""
        table.add_row(
            figure.name,
            f"{figure.value:.4g}",
            figure.unit,
            against,
            f"{figure.ratio:.2f}" if figure.ratio is not None else "",
            aim,
            {True: "met", False: "short", None: ""}[figure.met],
        )
    return table
