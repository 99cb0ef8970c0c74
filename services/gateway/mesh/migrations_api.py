"""Placement and migrations over HTTP: what is where, what moves, and moves by hand."""

import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from libs.bus.bus import Bus
from libs.bus.errors import BusError, RequestTimedOut, Undecodable
from libs.bus.messages.migration import CancelMigration, ExplainRounds, MigrationDenied, StartMigration
from libs.bus.messages.presence import Presence
from libs.mesh.cluster_state import ClusterState
from libs.mesh.migrations import planned
from libs.mesh.workers import names_of
from libs.placement.migration import is_over, new_move_id
from libs.placement.placement import Placement
from services.gateway.api.auth import MIGRATIONS_PATH
from services.gateway.api.body import read_json
from services.gateway.api.errors import BadRequest, Conflict, NotFound
from services.gateway.mesh.coordinator import ask_coordinator
from services.gateway.mesh.migration_fields import MigrationRequest, check_shape, order_of
from services.gateway.mesh.placement_view import move_document, placement_document
from services.gateway.mesh.refusals import (
    broker_away,
    may_have_been_done,
    not_cancelled,
    not_started,
    over_words,
    unanswered,
)
from services.gateway.mesh.workers import worker_named

DEFAULT_ROUNDS, MAX_ROUNDS = 20, 200
ORDER_TIMEOUT_SECONDS = 5.0

_decoder = msgspec.json.Decoder(MigrationRequest)


class MigrationsApi:
    """`routes` below /v1/mesh. The owner of a module decides about it; the rest is as workers tell it."""

    def __init__(
        self, bus: Bus, cluster: ClusterState, *, deadline_seconds: float, max_body_bytes: int
    ) -> None:
        self._bus, self._cluster = bus, cluster
        self._deadline_seconds, self._max_body_bytes = deadline_seconds, max_body_bytes

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
        """Begin a move. 202 with its id; how it goes on is told at its address. Where the owner does not
        answer in time it may have begun, and the history tells within seconds whether it has."""
        asked = await read_json(request, _decoder, max_bytes=self._max_body_bytes)
        check_shape(asked)
        owner = self._owner(asked)
        host = self._worker(asked.host, "host") if asked.host is not None else None
        if host is not None and host.incarnation == owner.incarnation:
            said = f"{owner.name} is the home of this instance already; choose another worker as host"
            raise BadRequest(said, param="host")
        placement = self._placement(owner)
        order = order_of(
            asked,
            placement,
            move_id=new_move_id(time.time(), secrets.token_hex(2), is_automatic=False),
            host=host.incarnation if host is not None else "",
            deadline_seconds=self._deadline_seconds,
        )
        self._remember(order, owner, placement)
        epoch = await self._order(order, owner, asked)
        location = f"{MIGRATIONS_PATH}/{order.move_id}"
        return _json({"id": order.move_id, "epoch": epoch}, 202, {"location": location})

    def _remember(self, order: StartMigration, owner: Presence, placement: Placement) -> None:
        placed = placement.get(order.returned_move_id)
        module, host = (placed.module, placed.worker) if placed is not None else (order.module, order.host)
        if module is not None:
            now, host_name = time.time(), self._cluster.name(host)
            self._cluster.migrations.hear(planned(order, owner, module, host, host_name, now), now)

    async def _order(self, order: StartMigration, owner: Presence, asked: MigrationRequest) -> int:
        """The epoch by its answer, or as it was known."""
        try:
            answer = await self._bus.request(
                order, to=owner.incarnation, timeout_seconds=ORDER_TIMEOUT_SECONDS
            )
        except (RequestTimedOut, Undecodable):
            return order.expected_epoch
        except BusError as error:
            if not may_have_been_done(error):
                self._cluster.migrations.withdraw(order.move_id)
            raise unanswered(error, owner.name) from error
        if isinstance(answer, MigrationDenied):
            self._cluster.migrations.withdraw(order.move_id)
            raise not_started(answer, asked, self._owners_of(order.returned_move_id))
        return answer.epoch

    async def moves(self, _request: Request) -> Response:
        """Moves under way and past, the newest first."""
        names = names_of(self._cluster.roster.all())
        told = [move_document(move, names) for move in self._cluster.migrations.newest_first()]
        return _json({"data": told})

    async def move(self, request: Request) -> Response:
        """One of them."""
        record = self._cluster.migrations.get(move_id := request.path_params["move_id"])
        if record is None:
            raise self._unknown(move_id)
        return _json(move_document(record, names_of(self._cluster.roster.all())))

    async def cancel(self, request: Request) -> Response:
        """Roll a move back, if it has not switched."""
        record = self._cluster.migrations.get(move_id := request.path_params["move_id"])
        if record is None:
            raise self._unknown(move_id)
        if is_over(record.phase):
            raise Conflict(over_words(record), code="cannot_cancel", epoch=record.epoch)
        order = CancelMigration(move_id=move_id)
        try:
            answer = await self._bus.request(order, to=record.instance, timeout_seconds=ORDER_TIMEOUT_SECONDS)
        except BusError as error:
            name = record.instance_name or self._cluster.name(record.instance)
            raise unanswered(error, name) from error
        if isinstance(answer, MigrationDenied):
            raise not_cancelled(answer, move_id)
        return _json({"id": answer.move_id, "epoch": answer.epoch}, 202)

    async def placement(self, _request: Request) -> Response:
        """Who runs which layers and holds which heads of every instance."""
        return _json({"instances": placement_document(self._cluster, time.time())})

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

    # Names

    def _unknown(self, move_id: str) -> Exception:
        if not self._bus.is_connected:
            return broker_away(f"no migration {move_id!r} was known before")
        said = f"there is no migration {move_id!r}; GET {MIGRATIONS_PATH} lists those that are remembered"
        return NotFound(said, param="id", code="migration_not_found")

    def _worker(self, name: str, param: str) -> Presence:
        code = "instance_not_found" if param == "instance" else "worker_not_found"
        return worker_named(self._bus, self._cluster.roster, name, param=param, code=code)

    def _owner(self, asked: MigrationRequest) -> Presence:
        """The instance that is named, else the one whose module it is, or is about to leave."""
        if asked.instance is not None:
            return self._worker(asked.instance, "instance")
        owners = self._owners_of(move_id := asked.return_of or "")
        if len(owners) == 1:
            return owners[0]
        if owners:
            names = ", ".join(owner.name for owner in owners)
            said = f"move {move_id!r} brought away modules of {names}; name the instance, too"
            raise BadRequest(said, param="return_of", code="invalid_move")
        away = ", ".join(
            f"{placed.move_id} (of {owner.name})" for owner, placed in self._cluster.modules_away()
        )
        said = f"no module that move {move_id!r} brought away is away; " + (
            f"what is away was brought there by {away}" if away else "every module is at home"
        )
        raise NotFound(said, param="return_of", code="module_not_found")

    def _owners_of(self, move_id: str) -> list[Presence]:
        """The owners of what a move brought away or is about to."""
        owners = {
            owner.incarnation: owner
            for owner, placed in self._cluster.modules_away()
            if placed.move_id == move_id
        }
        record = self._cluster.migrations.get(move_id)
        if record is not None and not is_over(record.phase):
            owner = self._cluster.roster.get(record.instance)
            owners |= {owner.incarnation: owner} if owner is not None else {}
        return list(owners.values())

    def _placement(self, owner: Presence) -> Placement:
        heard = self._cluster.placement(owner.incarnation)
        if heard is None:
            said = f"{owner.name} is not ready yet: it has not told its placement; order it again when it is"
            raise Conflict(said, code="not_ready")
        return heard.message.placement


def _json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status, headers, "application/json")
