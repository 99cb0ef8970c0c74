"""A worker's change of role: it drains, and its process lives on as a worker of the other kind.

The new one is a new incarnation under the same name and process id, and is given those flags of the old one
that workers of both kinds have. Flags that only one kind has wait in the environment until it is that kind
again. What comes from the environment or from a file is read by the new one as it would be at any start.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from libs.bus.messages.migration import DenialReason, FlipRole, MoveAccepted, MoveDenied
from libs.bus.messages.presence import ServiceKind, ServiceState
from libs.bus.subscriptions import Subscription
from libs.config.errors import BadSetting
from libs.config.fields import flag_of, settings_of
from libs.config.load import CONFIG
from libs.config.sources import from_flags
from libs.runtime.runtime import Runtime
from libs.runtime.successor import Successor
from libs.worker.settings import WorkerSettings
from libs.worker.stores.settings import StoreSettings

FLIPS_VARIABLE = "KVMESH_ROLE_FLIPS"
"""Set by a worker for the one that it becomes."""

_TITLES = {ServiceKind.PREFILL_WORKER: "a prefill worker", ServiceKind.DECODE_WORKER: "a decode worker"}

log = structlog.get_logger()


class Flips(msgspec.Struct, frozen=True, kw_only=True):
    """What a process remembers of its changes of role."""

    num_flips: int = 0
    set_aside: tuple[str, ...] = ()
    """Flags that only the other kind has."""


def flips_so_far(environ: Mapping[str, str]) -> Flips:
    """Of this process. Raises BadSetting."""
    if not (written := environ.get(FLIPS_VARIABLE)):
        return Flips()
    try:
        return msgspec.json.decode(written, type=Flips)
    except msgspec.DecodeError as error:
        origin = f"environment variable {FLIPS_VARIABLE}"
        raise BadSetting(origin, written, "what a worker leaves to the one that it becomes") from error


def worker_after(
    other: ServiceKind, name: str, settings_type: type[WorkerSettings], argv: Sequence[str], flips: Flips
) -> Successor:
    """The worker of the kind `other` that one started with the flags `argv` becomes. Raises SettingsError."""
    given = from_flags(argv, {**settings_of(settings_type), "config": CONFIG})
    shared, own = [f"--name={name}"], list[str]()
    for field, value in given.items():
        if field != "name":
            is_shared = field == "config" or field in StoreSettings.__struct_fields__
            (shared if is_shared else own).append(f"{flag_of(field)}={value.value}")
    after = Flips(num_flips=flips.num_flips + 1, set_aside=tuple(own))
    return Successor(
        module=f"services.{other.value}",
        flags=(*shared, *flips.set_aside),
        title=_TITLES[other],
        environ={FLIPS_VARIABLE: msgspec.json.encode(after).decode()},
    )


class RoleFlip:
    """Answers `FlipRole` for one worker. `denial` may name a reason of the worker's own not to flip."""

    def __init__(
        self,
        runtime: Runtime,
        settings: WorkerSettings,
        other: ServiceKind,
        *,
        denial: Callable[[], MoveDenied | None] = lambda: None,
    ) -> None:
        self._runtime, self._settings, self._other, self._denial = runtime, settings, other, denial
        self._flips = flips_so_far(os.environ)
        self._metric = _metric(runtime.registry)
        self._metric.inc(self._flips.num_flips)

    async def serve(self) -> Subscription:
        """Take orders from now on."""
        if self._flips.num_flips:
            log.info("role_flipped", num_flips=self._flips.num_flips)
        return await self._runtime.bus.serve(FlipRole, self._flip, at=self._runtime.incarnation)

    async def _flip(self, _order: FlipRole) -> MoveAccepted | MoveDenied:
        if denied := _not_serving(self._runtime) or self._denial():
            log.info("role_flip_denied", reason=denied.reason.value, detail=denied.detail)
            return denied
        self._runtime.end_as(self._worker_after())
        self._metric.inc()
        log.info("role_flip_begun", becoming=self._other.value)
        # Neither is known to a placement: this instance ends, the next one begins at epoch 0.
        return MoveAccepted(move_id=f"flip-{self._runtime.incarnation}", epoch=0)

    def _worker_after(self) -> Successor:
        name, settings_type = self._runtime.identity.name, type(self._settings)
        return worker_after(self._other, name, settings_type, sys.argv[1:], self._flips)


def runs_both(role: str) -> MoveDenied | None:
    """The denial of a worker that runs prompts and generates."""
    detail = "a worker of role both has no other kind to become; give it --role decode"
    return MoveDenied(reason=DenialReason.INVALID, detail=detail) if role == "both" else None


def _not_serving(runtime: Runtime) -> MoveDenied | None:
    """The denial while a worker drains, starts, or flips already."""
    presence = runtime.presence
    if runtime.successor or presence.state is ServiceState.DRAINING:
        detail = f"{presence.name} is draining" + (f": {presence.detail}" if presence.detail else "")
        return MoveDenied(reason=DenialReason.DRAINING, detail=detail)
    if presence.state is not ServiceState.READY:
        return MoveDenied(reason=DenialReason.BUSY, detail=f"{presence.name} is still starting")
    return None


def _metric(registry: CollectorRegistry) -> Counter:
    meaning = "Changes of role, prefill to decode or back, that this process began since it was started."
    return Counter("kvmesh_role_flips", meaning, registry=registry)
