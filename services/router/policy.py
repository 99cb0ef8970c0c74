"""Which of the usable instances: pure choices, named as the setting names them."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from libs.bus.messages.presence import ServiceKind
from services.router.view import Instance

Policy = Callable[[Sequence[Instance], int], Instance]
"""Takes at least one instance and the number of choices made so far."""


def round_robin(instances: Sequence[Instance], turn: int) -> Instance:
    """Each in its turn."""
    return instances[turn % len(instances)]


def least_load(instances: Sequence[Instance], turn: int) -> Instance:
    """The one with the fewest prompt tokens queued, then the fewest sequences, then most of its pool free.

    Ties go round, so that equal workers share equally.
    """
    start = turn % len(instances)
    rotated = [*instances[start:], *instances[:start]]
    return min(rotated, key=lambda i: (_queued_tokens(i), i.num_sequences, -_free_share(i)))


def _queued_tokens(instance: Instance) -> int:
    # A decode instance that only adopts KV has no prompt queue; what is on its way to it waits elsewhere.
    adopts = instance.presence.kind is ServiceKind.DECODE_WORKER and not instance.presence.runs_prompts
    return 0 if adopts else instance.num_waiting_tokens


def _free_share(instance: Instance) -> float:
    return instance.num_free_blocks / max(1, instance.num_blocks)


POLICIES: Mapping[str, Policy] = MappingProxyType({"round_robin": round_robin, "least_load": least_load})
