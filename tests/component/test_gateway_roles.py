"""Roles changed over HTTP: what a worker is asked, what clients see, and who may ask."""

from typing import Any

import httpx
import msgspec
import pytest
from gateway_mesh import Mesh
from gateway_moves import ask, error_of

from libs.bus.messages.migration import ChangeRole, DenialReason, MigrationDenied, RoleAccepted
from libs.placement.role import Role


class Asked:
    """What decode-0 was asked, and what it answers."""

    def __init__(self) -> None:
        self.roles: list[Role] = []
        self.denied: MigrationDenied | None = None

    async def change(self, order: ChangeRole) -> RoleAccepted | MigrationDenied:
        self.roles.append(order.role)
        return self.denied or RoleAccepted(role=order.role)


@pytest.fixture
async def asked(mesh: Mesh) -> Asked:
    asked, worker = Asked(), mesh.decodes[0]
    await worker.bus.serve(ChangeRole, asked.change, at=worker.incarnation)
    return asked


async def change(mesh: Mesh, name: str = "decode-0", body: Any = None, **how: Any) -> httpx.Response:
    return await ask(mesh, "POST", f"/v1/mesh/workers/{name}/role", body or {"role": "prefill"}, **how)


@pytest.mark.parametrize("role", Role)
async def test_the_worker_is_asked_by_name_or_incarnation(mesh: Mesh, asked: Asked, role: Role) -> None:
    incarnation = mesh.decodes[0].incarnation
    for name in ("decode-0", incarnation):
        answer = await change(mesh, name, {"role": role.value})
        assert answer.status_code == 202
        assert answer.json() == {"name": "decode-0", "incarnation": incarnation, "role": role.value}
    assert asked.roles == [role, role]


async def test_an_unknown_worker_is_404_by_name(mesh: Mesh, asked: Asked) -> None:
    answer = await change(mesh, "decode-9")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "worker_not_found")
    assert (error_of(answer)["param"], asked.roles) == ("name", [])
    assert "'decode-9'" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"role": "router"}, "role"),
        ({"role": 3}, "role"),
        ({"rule": "prefill"}, "rule"),
        ({"role": "both", "when": "now"}, "when"),
        ([], None),
    ],
)
async def test_what_is_no_role_is_400(mesh: Mesh, asked: Asked, body: Any, param: str | None) -> None:
    answer = await ask(mesh, "POST", "/v1/mesh/workers/decode-0/role", body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert asked.roles == []


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_without_the_admin_key_it_is_401(mesh: Mesh, asked: Asked, key: str | None) -> None:
    answer = await change(mesh, key=key)
    assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_admin_key")
    assert asked.roles == []


async def test_other_methods_are_405(mesh: Mesh) -> None:
    answer = await ask(mesh, "GET", "/v1/mesh/workers/decode-0/role")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("reason", [DenialReason.BUSY, DenialReason.DRAINING, DenialReason.NOT_READY])
async def test_what_the_worker_denies_is_409_in_its_words(
    mesh: Mesh, asked: Asked, reason: DenialReason
) -> None:
    asked.denied = MigrationDenied(reason=reason, detail="decode-0 says why")
    answer = await change(mesh)
    assert (answer.status_code, error_of(answer)["code"]) == (409, reason.value)
    assert error_of(answer)["message"] == "decode-0 says why"


async def test_a_worker_that_takes_no_orders_is_503(mesh: Mesh) -> None:
    answer = await change(mesh)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "worker_unreachable")
    assert "decode-0" in error_of(answer)["message"]
    assert "retry-after" in answer.headers


async def test_a_worker_that_fails_is_500(mesh: Mesh) -> None:
    async def fail(_: ChangeRole) -> RoleAccepted | MigrationDenied:
        raise RuntimeError("out of order")

    worker = mesh.decodes[0]
    await worker.bus.serve(ChangeRole, fail, at=worker.incarnation)
    assert (await change(mesh)).status_code == 500


async def test_the_mesh_tells_the_new_kind(mesh: Mesh) -> None:
    worker = mesh.decodes[0]
    kind = mesh.prefills[0].presence.kind
    worker.presence = msgspec.structs.replace(worker.presence, kind=kind)
    await worker.beat()
    async with mesh.http() as http:
        while True:
            services = (await http.get("/v1/mesh")).json()["services"]
            (told,) = (s for s in services if s["incarnation"] == worker.incarnation)
            if told["kind"] == "prefill_worker":
                break
        instances = (await http.get("/health")).json()["instances"]
        (instance,) = (i for i in instances if i["incarnation"] == worker.incarnation)
        assert instance["kind"] == "prefill_worker"
        ready = (await http.get("/ready")).json()
    assert "no decode worker is ready" in ready["reasons"]
