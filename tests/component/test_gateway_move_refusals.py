"""Moves that cannot begin or cannot be cancelled, as clients see it: which status, which code, what to do."""

import msgspec
import pytest
from gateway_coordinator import Coordinator, at_home, done, record, told
from gateway_mesh import Mesh
from gateway_moves import LAYERS, MIGRATIONS, ask, error_of, start, tell_placement

from libs.bus.messages.migration import DenialReason, MoveDenied, MoveTold
from libs.bus.messages.presence import ServiceState


@pytest.mark.parametrize("param", ["instance", "host"])
async def test_an_unknown_worker_is_404_by_name(mesh: Mesh, coordinator: Coordinator, param: str) -> None:
    answer = await start(mesh, **{**LAYERS, param: "decode-9"})
    assert answer.status_code == 404
    assert error_of(answer)["param"] == param
    assert error_of(answer)["code"] == {"instance": "instance_not_found", "host": "worker_not_found"}[param]
    assert "'decode-9'" in error_of(answer)["message"]
    assert coordinator.asked == []


@pytest.mark.parametrize(
    ("reason", "param", "name"),
    [
        (DenialReason.INSTANCE_NOT_FOUND, "instance", "'decode-0'"),
        (DenialReason.WORKER_NOT_FOUND, "host", "'prefill-0'"),
        (DenialReason.NOT_FOUND, "layers", "the module"),
    ],
)
async def test_of_what_the_coordinator_does_not_know_it_is_told_what_it_is_and_its_name(
    mesh: Mesh, coordinator: Coordinator, reason: DenialReason, param: str, name: str
) -> None:
    await tell_placement(mesh, told(at_home()))
    coordinator.answer = MoveDenied(reason=reason, detail="the module or 0123456789abcdef is not known")
    answer = await start(mesh, **LAYERS)
    error = error_of(answer)
    code = "module_not_found" if reason is DenialReason.NOT_FOUND else reason.value
    assert (answer.status_code, error["param"], error["code"]) == (404, param, code)
    assert name in error["message"]


@pytest.mark.parametrize("state", [ServiceState.STARTING, ServiceState.DRAINING])
async def test_a_worker_that_is_there_in_any_state_is_for_the_coordinator_to_judge(
    mesh: Mesh, coordinator: Coordinator, state: ServiceState
) -> None:
    await tell_placement(mesh, told(at_home()))
    worker = mesh.decodes[0]
    worker.presence = msgspec.structs.replace(worker.presence, state=state)
    await worker.beat()
    coordinator.answer = MoveDenied(reason=DenialReason.NOT_READY, detail="decode-0 is not ready yet")
    answer = await start(mesh, **LAYERS)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "not_ready")
    assert len(coordinator.asked) == 1


async def test_a_worker_whose_layers_nobody_knows_yet_is_not_ready(
    mesh: Mesh, coordinator: Coordinator
) -> None:
    answer = await start(mesh, **LAYERS)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "not_ready")
    assert "decode-0 is not ready yet" in error_of(answer)["message"]
    assert coordinator.asked == []


DENIALS = {
    DenialReason.STALE_EPOCH: (409, "stale_epoch", None),
    DenialReason.BUSY: (409, "busy", None),
    DenialReason.DRAINING: (409, "draining", None),
    DenialReason.NOT_READY: (409, "not_ready", None),
    DenialReason.NOT_LEADING: (503, "no_coordinator", None),
    DenialReason.UNREACHABLE: (503, "worker_unreachable", None),
    DenialReason.NO_ANSWER: (504, "worker_timeout", None),
    DenialReason.FAILED: (500, "internal_error", None),
    DenialReason.NOT_FOUND: (404, "module_not_found", "layers"),
    DenialReason.INVALID: (400, "invalid_move", "layers"),
}
OF_A_WORKER = (DenialReason.INSTANCE_NOT_FOUND, DenialReason.WORKER_NOT_FOUND)
"""Told in words of the gateway's own."""


@pytest.mark.parametrize("reason", [reason for reason in DenialReason if reason not in OF_A_WORKER])
async def test_the_coordinators_no_is_told_with_the_present_epoch(
    mesh: Mesh, coordinator: Coordinator, reason: DenialReason
) -> None:
    await tell_placement(mesh, told(at_home()))
    coordinator.answer = MoveDenied(reason=reason, detail="for a reason", epoch=7)
    answer = await start(mesh, **LAYERS)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == DENIALS[reason]
    assert error["message"] == "for a reason"
    assert error.get("epoch") == (7 if answer.status_code == 409 else None)
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)


async def test_an_epoch_that_nobody_knows_is_not_told(mesh: Mesh, coordinator: Coordinator) -> None:
    await tell_placement(mesh, told(at_home()))
    coordinator.answer = MoveDenied(reason=DenialReason.BUSY, detail="busy")
    assert "epoch" not in error_of(await start(mesh, **LAYERS))


CANCEL_DENIALS = {
    **DENIALS,
    **{reason: (409, "cannot_cancel", None) for reason, (status, _, _) in DENIALS.items() if status == 409},
    **dict.fromkeys((DenialReason.INVALID, *OF_A_WORKER), (409, "cannot_cancel", None)),
    DenialReason.NOT_FOUND: (404, "migration_not_found", "id"),
}


@pytest.mark.parametrize("reason", DenialReason)
async def test_cancelling_is_404_for_unknown_moves_alone(
    mesh: Mesh, coordinator: Coordinator, reason: DenialReason
) -> None:
    coordinator.answer = MoveDenied(reason=reason, detail="for a reason")
    answer = await ask(mesh, "DELETE", MIGRATIONS + "/m1")
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == CANCEL_DENIALS[reason]
    assert error["message"] == "for a reason"


async def test_a_move_that_a_new_coordinator_has_not_heard_of_is_not_unknown(
    mesh: Mesh, coordinator: Coordinator
) -> None:
    coordinator.answer = MoveDenied(reason=DenialReason.NOT_FOUND, detail="no such move")
    await mesh.bus.publish(MoveTold(move=record(move_id="m7")))
    await tell_placement(mesh, told(at_home(), moves=(done(move_id="m8"),)))
    assert (await ask(mesh, "GET", MIGRATIONS + "/m7")).json()["phase"] == "copying"
    early = await ask(mesh, "DELETE", MIGRATIONS + "/m7")
    assert (early.status_code, error_of(early)["code"]) == (503, "no_coordinator")
    over = await ask(mesh, "DELETE", MIGRATIONS + "/m8")
    assert (over.status_code, error_of(over)["code"]) == (409, "cannot_cancel")
    assert (await ask(mesh, "DELETE", MIGRATIONS + "/m9")).status_code == 404


@pytest.mark.parametrize(
    ("path", "wrong", "allowed"),
    [
        (MIGRATIONS, ("PUT", "PATCH", "DELETE"), {"GET", "HEAD", "POST"}),
        (MIGRATIONS + "/m1", ("PUT", "PATCH", "POST"), {"GET", "HEAD", "DELETE"}),
        ("/v1/mesh/placement", ("POST", "DELETE"), {"GET", "HEAD"}),
        ("/v1/mesh/explain", ("POST", "DELETE"), {"GET", "HEAD"}),
    ],
)
async def test_a_method_that_a_path_has_not_is_405_and_names_all_that_it_has(
    mesh: Mesh, path: str, wrong: tuple[str, ...], allowed: set[str]
) -> None:
    for method in wrong:
        answer = await ask(mesh, method, path)
        assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed"), method
        assert set(answer.headers["allow"].split(", ")) == allowed
        assert all(one in error_of(answer)["message"] for one in allowed)
