"""The conversation that moves modules: a gateway, for an operator, or the coordinator's loop -> home worker.

The home worker is the authority over its instance's placement, and carries a move out: it talks to the host
over their Link, and tells everybody how far it is. So a move outlives whoever ordered it, and who comes later
learns all from what the workers report.
"""

from enum import Enum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from libs.balancing.view import RoundReport
from libs.bus.message import Message, Request
from libs.placement.module import Module
from libs.placement.phases import MovePhase
from libs.placement.placement import Hosted, Placement
from libs.placement.role import Role


class MoveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One move, as far as it has come. Workers are named by incarnation and, for people, by name."""

    move_id: str
    instance: str
    instance_name: str = ""
    host: str
    """Where the module goes, or, where `is_return`, comes from."""
    host_name: str = ""
    module: Module
    is_return: bool = False
    """The module that the move `returned_move_id` brought away comes home."""
    returned_move_id: str = ""
    with_weights: bool = False
    """`migrate`: weights travel and are gone at home. Else `offload`: the host has the same ones."""
    phase: MovePhase
    expected_epoch: int
    epoch: int
    """The instance's now."""
    reason: str = ""
    """Who wanted it: manual, or the loop's words."""
    error: str = ""
    started_unix_seconds: float
    ended_unix_seconds: float = 0.0
    phase_seconds: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """How long each phase took, by the value of `MovePhase`."""
    num_kv_bytes: int = 0
    num_weight_bytes: int = 0
    num_total_bytes: int = 0
    """That there are to copy, as far as is known: what steps write anew is added. 0: not known yet."""
    num_rounds: int = 0
    """Delta rounds before the switch."""
    pause_seconds: float = 0.0
    """How long the switch kept the home from its steps."""
    num_blocks_before: int | None = None
    num_blocks_after: int | None = None
    """Capacity of the home's KV pool when the move began, and from its switch on or after it was rolled back.
    None: not known yet, or never, as of a move whose home left."""


class MoveAccepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """It begins; `MoveTold` says how it goes on."""

    move_id: str
    epoch: int


class DenialReason(Enum):
    """Why no move begins."""

    STALE_EPOCH = "stale_epoch"
    """The placement is another than the asker knew."""
    INVALID = "invalid"
    WORKER_NOT_FOUND = "worker_not_found"
    """Nobody knows the worker that is to be the host."""
    NOT_FOUND = "not_found"
    """Of the module that is to come home, or of the move."""
    BUSY = "busy"
    """This instance has a move under way."""
    DRAINING = "draining"
    """A worker that it needs is about to end."""
    NOT_READY = "not_ready"
    """A worker that it needs is still starting, or has not told its placement yet."""


class MoveDenied(msgspec.Struct, frozen=True, kw_only=True, tag="denied"):
    """Nothing was begun, as far as is known. `epoch` is the placement's now, where it is known."""

    reason: DenialReason
    detail: str
    epoch: int = -1


class StartMove(Request[MoveAccepted | MoveDenied], frozen=True, kw_only=True, tag="start_move"):
    """Gateway or coordinator -> home worker. Asked twice with one `move_id`, it begins once."""

    subject: ClassVar[str] = "kvmesh.worker.{to}.start_move"
    answer: ClassVar[object] = MoveAccepted | MoveDenied
    move_id: str
    module: Module | None = None
    """None: `returned_move_id` comes home."""
    returned_move_id: str = ""
    host: str = ""
    """Incarnation; empty where a module comes home."""
    with_weights: bool = False
    num_blocks: int = 0
    """That the host is to hold, or to lend; 0: as many as it can spare and the home can use."""
    expected_epoch: int
    deadline_seconds: float
    """From now; not switched by then, it is rolled back."""
    reason: str = ""


class AbandonMove(Request[MoveAccepted | MoveDenied], frozen=True, kw_only=True, tag="abandon_move"):
    """Gateway or coordinator -> home worker: roll back, if it has not switched.

    Denied as NOT_FOUND or INVALID.
    """

    subject: ClassVar[str] = "kvmesh.worker.{to}.abandon_move"
    answer: ClassVar[object] = MoveAccepted | MoveDenied
    move_id: str


class MoveTold(Message, frozen=True, kw_only=True, tag="move_told"):
    """A move entered a phase, or ended; published by the home worker."""

    subject: ClassVar[str] = "kvmesh.migration.told"
    move: MoveRecord


class PlacementTold(Message, frozen=True, kw_only=True, tag="placement_told"):
    """Published by each worker once a second, and when something in it changes."""

    subject: ClassVar[str] = "kvmesh.placement.told"
    placement: Placement
    """Of its own instance; `home` is the worker."""
    num_blocks: int = 0
    """Of the instance's KV pool under this placement; 0: not told."""
    hosted: tuple[Hosted, ...] = ()
    moves: tuple[MoveRecord, ...] = ()
    """Under way, and the last that ended."""


class RoleAccepted(msgspec.Struct, frozen=True, kw_only=True, tag="role_accepted"):
    """The worker has this role, or changes to it: its presence tells."""

    role: Role


class ChangeRole(Request[RoleAccepted | MoveDenied], frozen=True, kw_only=True, tag="change_role"):
    """Gateway or coordinator -> worker: end the work in progress, then serve in this role."""

    subject: ClassVar[str] = "kvmesh.worker.{to}.change_role"
    answer: ClassVar[object] = RoleAccepted | MoveDenied
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
