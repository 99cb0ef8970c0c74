"""The role of a worker, and its change in place."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from libs.bus.messages.migration import ChangeRole, DenialReason, MigrationDenied, RoleAccepted
from libs.bus.messages.presence import ServiceState
from libs.placement.role import Role
from libs.runtime.runtime import Runtime
from libs.worker.admission import Admission

log = structlog.get_logger()


class RoleChanges:
    """Answers `ChangeRole`, one change at a time. `answers_sent` returns when the work in progress has ended;
    `enter` does what a new role needs."""

    def __init__(
        self,
        runtime: Runtime,
        admission: Admission,
        answers_sent: Callable[[], Awaitable[None]],
        enter: Callable[[Role], None],
        role: Role,
    ) -> None:
        self._runtime, self._admission = runtime, admission
        self._answers_sent, self._enter, self._role = answers_sent, enter, role
        self._changing: asyncio.Task[None] | None = None
        self._next_role = role

    async def order(self, order: ChangeRole) -> RoleAccepted | MigrationDenied:
        """Begin it, if it has not that role already."""
        denied = self._denial(order.role)
        if denied is not None:
            log.info("role_change_denied", role=order.role.value, detail=denied.detail)
            return denied
        if order.role is not self._role and self._changing is None:
            self._next_role = order.role
            self._changing = self._runtime.spawn("change-role", self._change(order.role))
            self._changing.add_done_callback(self._changed)
        return RoleAccepted(role=order.role)

    def cancel(self) -> None:
        """The worker is to end: it keeps the role that it has."""
        if self._changing is not None:
            self._changing.cancel()

    def _denial(self, role: Role) -> MigrationDenied | None:
        presence = self._runtime.presence
        why = f": {presence.detail}" if presence.detail else ""
        if self._changing is not None:
            if self._next_role is role:
                return None
            detail = f"{presence.name} is {_becoming(self._next_role)} already"
            return MigrationDenied(reason=DenialReason.BUSY, detail=detail)
        if presence.state is ServiceState.STARTING:
            detail = f"{presence.name} is still starting{why}; order it again when it is ready"
            return MigrationDenied(reason=DenialReason.NOT_READY, detail=detail)
        if presence.state is ServiceState.DRAINING:
            return MigrationDenied(
                reason=DenialReason.DRAINING, detail=f"{presence.name} is about to end{why}"
            )
        return None

    async def _change(self, role: Role) -> None:
        """End the work in progress, then take other work. Modules stay where they are, on both sides."""
        log.info("role_change_begun", role=role.value)
        self._admission.draining = f"this worker is {_becoming(role)}"
        self._runtime.become(ServiceState.DRAINING, _becoming(role))
        await self._answers_sent()
        ended_at = time.monotonic()
        self._role = role
        self._enter(role)
        self._admission.draining = ""
        self._runtime.become(ServiceState.READY)
        self._runtime.load_changed()
        log.info("role_changed", role=role.value, idle_seconds=round(time.monotonic() - ended_at, 3))

    def _changed(self, _: "asyncio.Task[None]") -> None:
        self._changing = None


def _becoming(role: Role) -> str:
    return "changing its role to " + role.value
