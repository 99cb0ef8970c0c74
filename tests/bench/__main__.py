"""`python -m tests.bench [SECTION ...]`: measures, prints tables with ratios, and keeps them as JSON."""

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
from tests.bench.balance import measure_balance
from tests.bench.bus import measure_bus
from tests.bench.disk import measure_disk
from tests.bench.engine import measure_engine
from tests.bench.figures import Section, as_record, as_table
from tests.bench.kernels import measure_kernels
from tests.bench.links import measure_links
from tests.bench.machine import machine_figures
from tests.bench.mesh import measure_mesh
from tests.bench.migration import measure_migration
from tests.bench.overlap import measure_overlap
from tests.bench.router import measure_router
from tests.bench.store import measure_store

SECTIONS = (
    Section("machine", "This machine", machine_figures),
    Section("bus", "Bus", measure_bus),
    Section("transport", "Links", measure_links),
    Section("kernels", "Kernels", measure_kernels),
    Section("engine", "Engine alone, SmolLM2-135M in bf16", measure_engine),
    Section("overlap", "Fetch and compute at the same time, SmolLM2-135M in bf16", measure_overlap),
    Section("mesh", "Mesh against the engine alone", measure_mesh),
    Section("routing", "Routing decisions, 1000 workers", measure_router),
    Section("store", "KV store", measure_store),
    Section("migration", "Migrations of modules while 16 sequences decode, SmolLM2-135M", measure_migration),
    Section(
        "balance",
        "Coordinator on against off, 2 prefill and 2 decode workers of --device-share 0.25: each like a "
        "slower device with a memory of its own, since two cores bound what four workers can gain",
        measure_balance,
    ),
    Section("disk", "Disk tier, 64 MiB of blocks", measure_disk),
)


def main() -> None:
    """Run the sections named, or all."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
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
