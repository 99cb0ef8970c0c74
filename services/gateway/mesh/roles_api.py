"""Changes of a worker's role over HTTP."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from libs.bus.bus import Bus
from libs.bus.errors import BusError
from libs.bus.messages.migration import ChangeRole, DenialReason, MigrationDenied
from libs.placement.role import Role
from libs.runtime.roster import Roster
from services.gateway.api.auth import WORKERS_PATH
from services.gateway.api.body import read_json
from services.gateway.api.errors import Conflict
from services.gateway.mesh.refusals import unanswered
from services.gateway.mesh.workers import worker_named

ORDER_TIMEOUT_SECONDS = 5.0


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the worker is to do from now on."""

    role: Role


_decoder = msgspec.json.Decoder(RoleRequest)


class RolesApi:
    """One route. Workers by name or incarnation; they are asked directly, without a coordinator."""

    def __init__(self, bus: Bus, roster: Roster, *, max_body_bytes: int) -> None:
        self._bus, self._roster, self._max_body_bytes = bus, roster, max_body_bytes

    def routes(self) -> list[Route]:
        """All paths."""
        return [Route(WORKERS_PATH + "/{name}/role", self.change, methods=["POST"])]

    async def change(self, request: Request) -> Response:
        """Order it. 202: GET /v1/mesh tells when the worker is ready in that role."""
        asked = await read_json(request, _decoder, max_bytes=self._max_body_bytes)
        code = DenialReason.WORKER_NOT_FOUND.value
        name = request.path_params["name"]
        worker = worker_named(self._bus, self._roster, name, param="name", code=code)
        order = ChangeRole(role=asked.role)
        try:
            answer = await self._bus.request(
                order, to=worker.incarnation, timeout_seconds=ORDER_TIMEOUT_SECONDS
            )
        except BusError as error:
            raise unanswered(error, worker.name, "GET /v1/mesh (kvmesh status)") from error
        if isinstance(answer, MigrationDenied):
            raise Conflict(answer.detail, code=answer.reason.value)
        told = {"name": worker.name, "incarnation": worker.incarnation, "role": answer.role.value}
        return Response(msgspec.json.encode(told), 202, media_type="application/json")
