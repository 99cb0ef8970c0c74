"""Routing decisions among a thousand workers, and the router's memory, measured in a process of their own."""

import json
import subprocess
import sys
from collections.abc import Callable

from services.bench.figures import Figure

DECISION_AIM_MS = 1.0
MEMORY_AIM = 1.05
"""After 100k prompts more, as a multiple of before."""


def measure_routing(say: Callable[[str], None]) -> list[Figure]:
    """About half a minute."""
    say("decisions of each policy among 1000 workers, then 100k distinct prompts")
    command = [sys.executable, "-m", "services.router.bench"]
    seen = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    figures = [
        Figure(
            f"{policy}: decision p99",
            took["clock"],
            "ms",
            took["processor"],
            "processor time",
            at_most=DECISION_AIM_MS,
        )
        for policy, took in seen["decision_ms"].items()
    ]
    before, after = seen["settled_mib"], seen["after_mib"]
    return [
        *figures,
        Figure(
            "memory after 100k more distinct prompts",
            after,
            "MiB",
            before,
            "before them",
            at_most=MEMORY_AIM * before,
        ),
    ]
