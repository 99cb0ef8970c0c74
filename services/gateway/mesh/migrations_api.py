"""Placement and migrations over HTTP: what is where, what moves, and moves by hand."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from libs.bus.bus import Bus
from libs.bus.messages.migration import (
    CancelMove,
    DenialReason,
    ExplainRounds,
    ListMoves,
    MoveDenied,
    MoveRecord,
    PlanMove,
)
from libs.bus.messages.presence import Presence, ServiceState
from libs.placement.phases import is_over
from libs.runtime.roster import Roster
from services.gateway.api.admin import MIGRATIONS_PATH
from services.gateway.api.body import read_json
from services.gateway.api.errors import ApiError, BadRequest, Conflict, DeadlineOver, NotFound, Unavailable
from services.gateway.mesh.coordinator import RETRY_SECONDS, ask_coordinator, no_answer_error
from services.gateway.mesh.migration_fields import MigrationRequest, check_shape, module_param, plan_of
from services.gateway.mesh.placement_view import move_document, names_of, placement_document
from services.gateway.mesh.placements import Placements
from services.gateway.mesh.view import WORKERS, Loads

DEFAULT_ROUNDS, MAX_ROUNDS = 20, 200

_decoder = msgspec.json.Decoder(MigrationRequest)


class MigrationsApi:
    """`routes` below /v1/mesh. Moves are the leading coordinator's; placements are as workers tell them."""

    def __init__(
        self, bus: Bus, roster: Roster, placements: Placements, loads: Loads, *, max_body_bytes: int
    ) -> None:
        self._bus, self._roster, self._placements, self._loads = bus, roster, placements, loads
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """All paths."""
        # One route for each path, so that a 405 names all the methods that there are.
        return [
            Route(MIGRATIONS_PATH, self._all, methods=["GET", "POST"]),
            Route(MIGRATIONS_PATH + "/{move_id}", self._one, methods=["GET", "DELETE"]),
            Route("/v1/mesh/placement", self.placement),
            Route("/v1/mesh/explain", self.explain),
        ]

    async def _all(self, request: Request) -> Response:
        return await (self.start if request.method == "POST" else self.moves)(request)

    async def _one(self, request: Request) -> Response:
        return await (self.cancel if request.method == "DELETE" else self.move)(request)

    async def start(self, request: Request) -> Response:
        """Begin a move. 202 with its id; how it goes on is told at its address."""
        asked = await read_json(request, _decoder, max_bytes=self._max_body_bytes)
        check_shape(asked)
        answer = await ask_coordinator(self._bus, self._plan(asked))
        if isinstance(answer, MoveDenied):
            raise _refusal(answer, asked)
        return _json(
            {"id": answer.move_id, "epoch": answer.epoch},
            202,
            {"location": f"{MIGRATIONS_PATH}/{answer.move_id}"},
        )

    def _plan(self, asked: MigrationRequest) -> PlanMove:
        if asked.host is None:  # it comes home: what is where the coordinator knows
            named = asked.instance
            whose = self._worker(named, "instance").incarnation if named is not None else ""
            return plan_of(asked, instance=whose, host="", num_layers=0)
        home = self._worker(asked.instance or "", "instance")
        host = self._worker(asked.host, "host")
        if host.incarnation == home.incarnation:
            said = f"{home.name} is the home of this instance already; choose another worker as host"
            raise BadRequest(said, param="host")
        num_layers = self._num_layers(home)
        return plan_of(asked, instance=home.incarnation, host=host.incarnation, num_layers=num_layers)

    async def moves(self, _request: Request) -> Response:
        """Moves under way and past, the newest first: the coordinator's, and those heard of here besides.

        A new leader knows nothing of moves whose home is gone.
        """
        try:
            listed = (await ask_coordinator(self._bus, ListMoves())).moves
            is_from_coordinator = True
        except (Unavailable, DeadlineOver):
            listed, is_from_coordinator = (), False
        ids = {move.move_id for move in listed}
        known = [*listed, *(move for move in self._placements.moves() if move.move_id not in ids)]
        known.sort(key=lambda move: move.started_unix_seconds, reverse=True)
        names = names_of(self._roster.all())
        told = [move_document(move, names) for move in known]
        return _json({"data": told, "is_from_coordinator": is_from_coordinator})

    async def move(self, request: Request) -> Response:
        """One of them. 404 only by the coordinator's word: this gateway may not have heard of it."""
        move_id = request.path_params["move_id"]
        try:
            found = await ask_coordinator(self._bus, ListMoves(move_id=move_id))
            known = [move for move in found.moves if move.move_id == move_id] or self._heard(move_id)
        except (Unavailable, DeadlineOver):
            if not (known := self._heard(move_id)):
                raise
        if not known:
            said = f"there is no migration {move_id!r}; GET {MIGRATIONS_PATH} lists those that are remembered"
            raise NotFound(said, param="id", code="migration_not_found")
        return _json(move_document(known[0], names_of(self._roster.all())))

    async def cancel(self, request: Request) -> Response:
        """Roll a move back, if it has not switched."""
        move_id = request.path_params["move_id"]
        answer = await ask_coordinator(self._bus, CancelMove(move_id=move_id))
        if isinstance(answer, MoveDenied):
            raise self._not_cancelled(answer, move_id)
        return _json({"id": answer.move_id, "epoch": answer.epoch}, 202)

    async def placement(self, _request: Request) -> Response:
        """Who runs which layers and holds which heads of every instance; needs no coordinator."""
        told = placement_document(self._roster.all(), self._placements, self._loads, time.monotonic())
        return _json({"instances": told})

    async def explain(self, request: Request) -> Response:
        """The last rounds of the coordinator's loop, the newest first."""
        text = request.query_params.get("rounds", str(DEFAULT_ROUNDS))
        num_rounds = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
        if not 1 <= num_rounds <= MAX_ROUNDS:
            said = f"rounds must be a whole number from 1 to {MAX_ROUNDS}, not {text[:20]!r}"
            raise BadRequest(said, param="rounds")
        answer = await ask_coordinator(self._bus, ExplainRounds(num_rounds=num_rounds))
        told: dict[str, Any] = msgspec.to_builtins(answer)
        del told["type"]
        return _json(told)

    def _heard(self, move_id: str) -> list[MoveRecord]:
        """What this gateway heard of it: the coordinator may have come just now, or be away."""
        return [move for move in self._placements.moves() if move.move_id == move_id]

    def _not_cancelled(self, denied: MoveDenied, move_id: str) -> ApiError:
        if (error := no_answer_error(denied)) is not None:
            return error
        if denied.reason is not DenialReason.NOT_FOUND:
            return Conflict(denied.detail, code="cannot_cancel", epoch=denied.epoch)
        if not (heard := self._heard(move_id)):
            return NotFound(denied.detail, param="id", code="migration_not_found")
        if is_over(heard[0].phase):
            said = f"the move {move_id} is over: {heard[0].phase.value}"
            return Conflict(said, code="cannot_cancel", epoch=heard[0].epoch)
        said = "the coordinator leads since just now and has not heard of this move yet; try again"
        return Unavailable(said, code="no_coordinator", retry_after_seconds=1)

    def _worker(self, name: str, param: str) -> Presence:
        """By incarnation, else by name, in any state; of several, the one that is ready."""
        workers = [p for p in self._roster.all() if p.kind in WORKERS and name in (p.incarnation, p.name)]
        workers.sort(key=lambda p: (p.incarnation != name, p.state is not ServiceState.READY))
        if not workers and not self._bus.is_connected:
            said = f"the broker is away, and no worker {name!r} was known before; try again when it is back"
            raise Unavailable(said, code="no_coordinator", retry_after_seconds=RETRY_SECONDS)
        if not workers:
            look = "GET /v1/mesh/placement (kvmesh placement)"
            said = f"there is no worker {name!r}; {look} lists those there are"
            raise NotFound(said, param=param, code=_NOT_FOUND_CODES[param].value)
        return workers[0]

    def _num_layers(self, home: Presence) -> int:
        heard = self._placements.get(home.incarnation)
        num_layers = heard.told.placement.num_layers if heard else home.num_layers
        if not num_layers:
            said = f"{home.name} is not ready yet: it has not told its layers; order it again when it is"
            raise Conflict(said, code=DenialReason.NOT_READY.value)
        return num_layers


_NOT_FOUND_CODES = {
    "instance": DenialReason.INSTANCE_NOT_FOUND,
    "host": DenialReason.WORKER_NOT_FOUND,
}


def _refusal(denied: MoveDenied, asked: MigrationRequest) -> ApiError:
    if (error := no_answer_error(denied)) is not None:
        return error
    match denied.reason:
        case DenialReason.INSTANCE_NOT_FOUND as reason:
            return NotFound(_just_left_words(asked.instance), param="instance", code=reason.value)
        case DenialReason.WORKER_NOT_FOUND as reason:
            return NotFound(_just_left_words(asked.host), param="host", code=reason.value)
        case DenialReason.NOT_FOUND:
            return NotFound(denied.detail, param=module_param(asked), code="module_not_found")
        case DenialReason.INVALID:
            return BadRequest(denied.detail, param=module_param(asked), code="invalid_move")
        case reason:
            return Conflict(denied.detail, code=reason.value, epoch=denied.epoch)


def _just_left_words(name: str | None) -> str:
    """Of a worker that this gateway knows, and who is asked does not: they speak of it by its incarnation."""
    return (
        f"the worker {name!r} has just left, or has just come; look at GET /v1/mesh/placement and try again"
    )


def _json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status, headers, "application/json")
