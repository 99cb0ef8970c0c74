"""Reports for people: one as a table, several side by side with their ratios."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

DISTRIBUTIONS = {
    "time_to_first_token_seconds": "time to first token",
    "inter_token_latency_seconds": "between two tokens",
    "time_per_output_token_seconds": "per output token",
    "end_to_end_seconds": "whole answer",
}
_COLUMNS = ("mean", "p50", "p90", "p99", "max")

COMPARED: dict[str, tuple[str, ...]] = {
    **{
        f"{words}, {figure} (s)": (name, figure)
        for name, words in DISTRIBUTIONS.items()
        for figure in ("mean", "p50", "p99")
    },
    "requests/s": ("throughput", "requests_per_second"),
    "output tokens/s": ("throughput", "output_tokens_per_second"),
    "goodput requests/s": ("goodput", "requests_per_second"),
    "cached share of prompts": ("tokens", "cached_share"),
    "succeeded": ("requests", "succeeded"),
    "failed": ("requests", "failed"),
}


def latency_table(report: Mapping[str, Any]) -> Table:
    """Milliseconds of each kind of waiting."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("milliseconds", no_wrap=True)
    for column in (*_COLUMNS, "count"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, words in DISTRIBUTIONS.items():
        figures = report[name]
        if figures:
            cells = [f"{figures[column] * 1000:,.1f}" for column in _COLUMNS]
            table.add_row(words, *cells, str(figures["count"]))
    return table


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """What is no distribution, a line each."""
    requests, throughput, tokens = report["requests"], report["throughput"], report["tokens"]
    lines = [
        f"{requests['succeeded']} of {requests['due']} requests succeeded in {report['seconds']:.1f} s: "
        f"{throughput['requests_per_second']:.2f} requests/s, "
        f"{throughput['output_tokens_per_second']:.1f} output tokens/s, "
        f"{throughput['prompt_tokens_per_second']:.1f} prompt tokens/s"
    ]
    if tokens["cached_share"] is not None:
        lines.append(f"{tokens['cached_share']:.1%} of {tokens['prompt']} prompt tokens came from a cache")
    if goodput := report["goodput"]:
        lines.append(
            f"goodput: {goodput['requests_per_second']:.2f} requests/s, "
            f"{goodput['share'] or 0:.1%} of all kept the targets"
        )
    if report["errors"]:
        lines.append("errors: " + ", ".join(f"{error} x {num}" for error, num in report["errors"].items()))
    if requests["cut_off"]:
        lines.append(f"{requests['cut_off']} requests were cut off by the end of the test")
    if requests["held_back"]:
        lines.append(
            f"{requests['held_back']} requests were held back, the longest for "
            f"{requests['longest_held_back_seconds']:.2f} s: the load was not as asked for"
        )
    return lines


def comparison_table(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Each report a column, and beside each but the first its ratio to the first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for number, (name, _) in enumerate(reports):
        table.add_column(name, justify="right")
        if number:
            table.add_column("ratio", justify="right", no_wrap=True)
    for words, path in COMPARED.items():
        values = [figure_of(report, path) for _, report in reports]
        if all(value is None for value in values):
            continue
        cells = [_cell(values[0])]
        for value in values[1:]:
            cells += [_cell(value), _ratio(value, values[0])]
        table.add_row(words, *cells)
    return table


def figure_of(report: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """One figure of a report; None where it has none."""
    here: Any = report
    for name in path:
        here = here.get(name) if isinstance(here, Mapping) else None
    return None if here is None else float(here)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _ratio(value: float | None, first: float | None) -> str:
    return f"{value / first:.3f}" if value is not None and first else "-"
