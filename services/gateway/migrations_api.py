"""Placement and migrations over HTTP: what is where, what moves, and moves by hand."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from libs.bus.messages.migration import (
    CancelMove,
    DenialReason,
    ExplainRounds,
    ListMoves,
    MoveDenied,
    MoveRecord,
)
from libs.bus.messages.presence import Presence, ServiceState
from libs.bus.port import Bus
from libs.runtime.roster import Roster
from services.gateway.admin import MIGRATIONS_PATH
from services.gateway.body import read_json
from services.gateway.coordinator import ask_coordinator
from services.gateway.errors import ApiError, BadRequest, Conflict, NotFound, Unavailable
from services.gateway.migration_fields import MigrationRequest, check_shape, module_param, plan_of
from services.gateway.placement_view import move_document, names_of, placement_document
from services.gateway.placements import Placements
from services.gateway.view import WORKERS, Loads

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
        one = MIGRATIONS_PATH + "/{move_id}"
        return [
            Route(MIGRATIONS_PATH, self.start, methods=["POST"]),
            Route(MIGRATIONS_PATH, self.moves),
            Route(one, self.cancel, methods=["DELETE"]),
            Route(one, self.move),
            Route("/v1/mesh/placement", self.placement),
            Route("/v1/mesh/explain", self.explain),
        ]

    async def start(self, request: Request) -> Response:
        """Begin a move. 202 with its id; how it goes on is told at its address."""
        asked = await read_json(request, _decoder, max_bytes=self._max_body_bytes)
        check_shape(asked)
        home = self._worker(asked.instance, "instance")
        host = self._worker(asked.host, "host").incarnation if asked.host is not None else ""
        if host == home.incarnation:
            raise BadRequest(f"{home.name} is the home of this instance already", param="host")
        num_layers = self._num_layers(home)
        plan = plan_of(asked, instance=home.incarnation, host=host, num_layers=num_layers)
        answer = await ask_coordinator(self._bus, plan)
        if isinstance(answer, MoveDenied):
            raise _refusal(answer, module_param(asked))
        return _json(
            {"id": answer.move_id, "epoch": answer.epoch},
            202,
            {"location": f"{MIGRATIONS_PATH}/{answer.move_id}"},
        )

    async def moves(self, _request: Request) -> Response:
        """Moves under way and past, the newest first."""
        known, is_from_coordinator = await self._known_moves("")
        names = names_of(self._roster.all())
        told = [move_document(move, names) for move in known]
        return _json({"data": told, "is_from_coordinator": is_from_coordinator})

    async def move(self, request: Request) -> Response:
        """One of them."""
        move_id = request.path_params["move_id"]
        known, _ = await self._known_moves(move_id)
        if not known:
            raise NotFound(f"there is no migration {move_id!r}", param="id", code="migration_not_found")
        return _json(move_document(known[0], names_of(self._roster.all())))

    async def cancel(self, request: Request) -> Response:
        """Roll a move back, if it has not switched."""
        move_id = request.path_params["move_id"]
        answer = await ask_coordinator(self._bus, CancelMove(move_id=move_id))
        if isinstance(answer, MoveDenied):
            if answer.reason is DenialReason.NOT_FOUND:
                raise NotFound(answer.detail, param="id", code="migration_not_found")
            raise Conflict(answer.detail, code="cannot_cancel", epoch=answer.epoch)
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

    async def _known_moves(self, move_id: str) -> tuple[list[MoveRecord], bool]:
        """The coordinator's records, which reach back further; without one, what was heard here."""
        try:
            moves = list((await ask_coordinator(self._bus, ListMoves(move_id=move_id))).moves)
        except Unavailable:
            return [m for m in self._placements.moves() if move_id in ("", m.move_id)], False
        return [m for m in moves if move_id in ("", m.move_id)], True

    def _worker(self, name: str, param: str) -> Presence:
        """By incarnation, else by name; of several, the one that is ready."""
        workers = [p for p in self._roster.all() if p.kind in WORKERS and name in (p.incarnation, p.name)]
        workers.sort(key=lambda p: (p.incarnation != name, p.state is not ServiceState.READY))
        if not workers:
            raise NotFound(f"there is no worker {name!r}", param=param, code="worker_not_found")
        return workers[0]

    def _num_layers(self, home: Presence) -> int:
        heard = self._placements.get(home.incarnation)
        num_layers = heard.told.placement.num_layers if heard else home.num_layers
        if not num_layers:
            raise Unavailable(f"{home.name} has not told its layers yet", retry_after_seconds=1)
        return num_layers


def _refusal(denied: MoveDenied, param: str) -> ApiError:
    match denied.reason:
        case DenialReason.NOT_FOUND:
            return NotFound(denied.detail, param=param, code="module_not_found")
        case DenialReason.INVALID:
            return BadRequest(denied.detail, param=param, code="invalid_move")
        case reason:
            return Conflict(denied.detail, code=reason.value, epoch=denied.epoch)


def _json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status, headers, "application/json")
