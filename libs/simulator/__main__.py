"""python -m libs.simulator: compares routing policies, or the coordinator's loop on and off."""

import sys

from rich.console import Console
from rich.progress import Progress

from libs.config.load import load_settings_or_exit
from libs.simulator.balance_compare import balance_json, balance_table, compare_balancing
from libs.simulator.compare import UnknownPolicy, compare
from libs.simulator.report import as_json, as_table
from libs.simulator.settings import SimulatorSettings
from libs.simulator.trace import BadTrace


def main() -> None:
    """Ends with 2 and one line on what cannot be replayed."""
    # No environment: what is set for the services of a mesh is not meant for a thought experiment.
    settings = load_settings_or_exit(SimulatorSettings, "simulator", environ={})
    try:
        if settings.balance:
            balanced = compare_balancing(settings)
            print(balance_json(balanced) if settings.output == "json" else balance_table(balanced))
            return
        with Progress(console=Console(stderr=True), transient=True) as progress:
            reports = compare(settings, lambda requests, name: progress.track(requests, description=name))
    except (BadTrace, UnknownPolicy, OSError, ValueError) as error:
        print(f"simulator: {error}", file=sys.stderr)
        sys.exit(2)
    print(as_json(reports) if settings.output == "json" else as_table(reports))


if __name__ == "__main__":
    main()
