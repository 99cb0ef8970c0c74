"""The conversation that migrates modules: a gateway, for an operator, or the coordinator's loop -> owner.

The owner of a module is the worker of its instance: the authority over the instance's placement. It carries a
migration out, talks to the host over their Link, and publishes how far it is. So a migration outlives whoever
ordered it, and who comes later learns all from what the workers publish.
"""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from libs.balancing.view import RoundReport
from libs.bus.message import Message, Request
from libs.placement.migration import MigrationPhase
from libs.placement.module import Module
from libs.placement.placement import HostedModuleStatus, Placement
from libs.placement.role import Role


class MigrationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One migration, as far as it has come. Workers are named by incarnation and, for people, by name."""

    move_id: str
    instance: str
    instance_name: str = ""
    host: str
    """Where the module goes, or, where `is_return`, comes from."""
    host_name: str = ""
    module: Module
    is_return: bool = False
    """The module that the migration `returned_move_id` brought away comes back."""
    returned_move_id: str = ""
    with_weights: bool = False
    """`migrate`: weights travel and are gone at the owner. Else `offload`: the host has the same ones."""
    phase: MigrationPhase
    expected_epoch: int
    epoch: int
    """The instance's now."""
    reason: str = ""
    """Who wanted it: manual, or the loop's words."""
    error: str = ""
    started_unix_seconds: float
    ended_unix_seconds: float = 0.0
    phase_seconds: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """How long each phase took, by the value of `MigrationPhase`."""
    num_kv_bytes: int = 0
    num_weight_bytes: int = 0
    num_total_bytes: int = 0
    """That there are to copy, as far as is known: what steps write anew is added. 0: not known yet."""
    num_rounds: int = 0
    """Delta rounds before the switch."""
    pause_seconds: float = 0.0
    """How long the switch kept the owner from its steps."""
    num_blocks_before: int | None = None
    num_blocks_after: int | None = None
    """Capacity of the owner's KV pool when it began, and from its switch on or after it was rolled back.
    None: not known yet, or never, as where the owner left."""


class MigrationAccepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """It begins; `MigrationUpdate` says how it goes on."""

    move_id: str
    epoch: int


class DenialReason(Enum):
    """Why no migration begins."""

    STALE_EPOCH = "stale_epoch"
    """The placement is another than the asker knew."""
    INVALID = "invalid"
    WORKER_NOT_FOUND = "worker_not_found"
    """Nobody knows the worker that is to be the host."""
    NOT_FOUND = "not_found"
    """Of the module that is to come back, or of the migration."""
    BUSY = "busy"
    """This instance has a migration under way."""
    DRAINING = "draining"
    """A worker that it needs is about to end."""
    NOT_READY = "not_ready"
    """A worker that it needs is still starting, or has not told its placement yet."""


class MigrationDenied(msgspec.Struct, frozen=True, kw_only=True, tag="denied"):
    """Nothing was begun, as far as is known. `epoch` is the placement's now, where it is known."""

    reason: DenialReason
    detail: str
    epoch: int = -1


class StartMigration(
    Request[MigrationAccepted | MigrationDenied], frozen=True, kw_only=True, tag="start_migration"
):
    """Gateway or coordinator -> owner. Asked twice with one `move_id`, it begins once."""

    subject: ClassVar[str] = "kvmesh.worker.{to}.start_migration"
    answer: ClassVar[object] = MigrationAccepted | MigrationDenied
    move_id: str
    module: Module | None = None
    """None: `returned_move_id` comes back."""
    returned_move_id: str = ""
    host: str = ""
    """Incarnation; empty where a module comes back."""
    with_weights: bool = False
    num_blocks: int = 0
    """That the host is to hold, or to lend; 0: as many as it can spare and the owner can use."""
    expected_epoch: int
    deadline_seconds: float
    """From now; not switched by then, it is rolled back."""
    reason: str = ""


class CancelMigration(
    Request[MigrationAccepted | MigrationDenied], frozen=True, kw_only=True, tag="cancel_migration"
):
    """Gateway or coordinator -> owner: roll back, if it has not switched.

    Denied as NOT_FOUND or INVALID.
    """

    subject: ClassVar[str] = "kvmesh.worker.{to}.cancel_migration"
    answer: ClassVar[object] = MigrationAccepted | MigrationDenied
    move_id: str


class MigrationUpdate(Message, frozen=True, kw_only=True, tag="migration_update"):
    """A migration entered a phase, or ended; published by the owner."""

    subject: ClassVar[str] = "kvmesh.migration.update"
    record: MigrationRecord


class PlacementUpdate(Message, frozen=True, kw_only=True, tag="placement_update"):
    """Published by each worker once a second, and when something in it changes."""

    subject: ClassVar[str] = "kvmesh.placement.update"
    placement: Placement
    """Of its own instance; `owner` is the worker."""
    num_blocks: int = 0
    """Of the instance's KV pool under this placement; 0: not told."""
    hosted: tuple[HostedModuleStatus, ...] = ()
    moves: tuple[MigrationRecord, ...] = ()
    """Under way, and the last that ended."""


class RoleAccepted(msgspec.Struct, frozen=True, kw_only=True, tag="role_accepted"):
    """The worker has this role, or changes to it: its presence tells."""

    role: Role


class ChangeRole(Request[RoleAccepted | MigrationDenied], frozen=True, kw_only=True, tag="change_role"):
    """Gateway or coordinator -> worker: end the work in progress, then serve in this role."""

    subject: ClassVar[str] = "kvmesh.worker.{to}.change_role"
    answer: ClassVar[object] = RoleAccepted | MigrationDenied
    role: Role


class Rounds(msgspec.Struct, frozen=True, kw_only=True, tag="rounds"):
    """Newest first."""

    leader: str
    is_automatic: bool
    """False: the loop only watches."""
    rounds: tuple[RoundReport, ...]


class ExplainRounds(Request[Rounds], frozen=True, kw_only=True, tag="explain_rounds"):
    """The last rounds of the loop."""

    subject: ClassVar[str] = "kvmesh.coordinator.explain"
    answer: ClassVar[object] = Rounds
    num_rounds: Annotated[int, Meta(ge=1, le=200)] = 20
