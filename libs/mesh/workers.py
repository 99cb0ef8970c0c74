"""Workers among the services that are there."""

from collections.abc import Iterable

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState

WORKERS = (ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER)


def find_worker(services: Iterable[Presence], who: str) -> Presence | None:
    """By incarnation or name, in any state; of several with a name, the last that came of those that are
    ready, or of all."""
    found = [one for one in services if one.kind in WORKERS and who in (one.incarnation, one.name)]
    found.sort(key=lambda one: (who == one.incarnation, one.state is ServiceState.READY))
    return found[-1] if found else None


def names_of(services: Iterable[Presence]) -> dict[str, str]:
    """Names of the workers that are here, by incarnation."""
    return {one.incarnation: one.name for one in services if one.kind in WORKERS}
