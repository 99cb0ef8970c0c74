"""`python -m services.bench [SECTION ...]`: measure, print tables with ratios, keep them as JSON."""

import argparse
import json
import platform
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.status import Status

from libs.runtime.garbage import freeze_garbage
from services.bench.figures import as_record, as_table
from services.bench.sections import SECTIONS


def main() -> None:
    """Run the sections named, or all."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m services.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(names)}; default: all")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench.json"), help="where the figures are kept"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(names):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    freeze_garbage()  # clients here are to see the mesh's pauses, not their own
    console = Console()
    record: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    for section in SECTIONS:
        if arguments.sections and section.name not in arguments.sections:
            continue
        with console.status(section.title) as status:
            figures = section.measure(partial(_show, status, section.title))
        console.print(as_table(section.title, figures))
        record[section.name] = [as_record(figure) for figure in figures]
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def _show(status: Status, title: str, doing: str) -> None:
    status.update(f"{title}: {doing}")


if __name__ == "__main__":
    main()
