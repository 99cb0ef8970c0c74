"""Moves that cannot begin or cannot be cancelled, as clients see it: which status, which code, what to do."""

import msgspec
import pytest
from gateway_coordinator import (
    DECODE,
    HEADS_AWAY,
    PREFILL,
    Owners,
    at_home,
    done,
    order,
    placed,
    record,
    told,
    without_ids,
)
from gateway_mesh import Mesh
from gateway_moves import LAYERS, MIGRATIONS, ask, error_of, start, tell_placement

from libs.bus.errors import (
    BusError,
    HandlerFailed,
    MessageTooLarge,
    NoResponders,
    NotConnected,
    Overloaded,
    RequestTimedOut,
    Undecodable,
)
from libs.bus.messages.migration import DenialReason, MigrationDenied
from libs.bus.messages.presence import ServiceKind, ServiceState
from libs.mesh import migrations
from libs.placement.migration import MigrationPhase
from libs.placement.module import whole_layers
from services.gateway.mesh import migrations_api
from services.gateway.mesh.refusals import may_have_been_done, unanswered


@pytest.mark.parametrize("param", ["instance", "host"])
async def test_an_unknown_worker_is_404_by_name(mesh: Mesh, owners: Owners, param: str) -> None:
    answer = await start(mesh, **{**LAYERS, param: "decode-9"})
    assert answer.status_code == 404
    assert error_of(answer)["param"] == param
    assert error_of(answer)["code"] == {"instance": "instance_not_found", "host": "worker_not_found"}[param]
    assert "'decode-9'" in error_of(answer)["message"]
    assert owners.asked == []


@pytest.mark.parametrize("state", [ServiceState.STARTING, ServiceState.DRAINING])
async def test_a_worker_that_is_there_in_any_state_is_for_the_owner_to_judge(
    mesh: Mesh, owners: Owners, state: ServiceState
) -> None:
    await tell_placement(mesh, told(at_home()))
    worker = mesh.prefills[0]
    worker.presence = msgspec.structs.replace(worker.presence, state=state)
    await worker.beat()
    owners.answer = MigrationDenied(reason=DenialReason.NOT_READY, detail="prefill-0 is not ready yet")
    answer = await start(mesh, **LAYERS)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "not_ready")
    assert len(owners.asked) == 1


async def test_a_worker_that_has_not_told_its_placement_is_not_ready(mesh: Mesh, owners: Owners) -> None:
    answer = await start(mesh, **LAYERS)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "not_ready")
    assert "decode-0 is not ready yet" in error_of(answer)["message"]
    assert owners.asked == []


async def test_of_workers_with_one_name_the_order_is_for_the_last_that_came(
    mesh: Mesh, owners: Owners
) -> None:
    await tell_placement(mesh, told(at_home()))
    late = await mesh.add(ServiceKind.DECODE_WORKER, "late")
    late.presence = msgspec.structs.replace(late.presence, name="decode-0")
    await late.beat()
    answer = await start(mesh, **LAYERS)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "not_ready"), "it has told nothing yet"
    late.presence = msgspec.structs.replace(late.presence, state=ServiceState.DRAINING)
    await late.beat()
    assert (await start(mesh, **LAYERS)).status_code == 202


DENIALS = {
    DenialReason.STALE_EPOCH: (409, "stale_epoch", None),
    DenialReason.BUSY: (409, "busy", None),
    DenialReason.DRAINING: (409, "draining", None),
    DenialReason.NOT_READY: (409, "not_ready", None),
    DenialReason.WORKER_NOT_FOUND: (404, "worker_not_found", "host"),
    DenialReason.NOT_FOUND: (404, "module_not_found", "layers"),
    DenialReason.INVALID: (400, "invalid_move", "layers"),
}


@pytest.mark.parametrize("reason", DenialReason)
async def test_the_owners_no_is_told_with_the_present_epoch_and_no_move_is_remembered(
    mesh: Mesh, owners: Owners, reason: DenialReason
) -> None:
    await tell_placement(mesh, told(at_home()))
    owners.answer = MigrationDenied(reason=reason, detail="for a reason", epoch=7)
    answer = await start(mesh, **LAYERS)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == DENIALS[reason]
    said = "'prefill-0' has just left" if reason is DenialReason.WORKER_NOT_FOUND else "for a reason"
    assert said in error["message"]
    assert error.get("epoch") == (7 if answer.status_code == 409 else None)
    assert (await ask(mesh, "GET", MIGRATIONS)).json() == {"data": []}


async def test_an_epoch_that_nobody_knows_is_not_told(mesh: Mesh, owners: Owners) -> None:
    await tell_placement(mesh, told(at_home()))
    owners.answer = MigrationDenied(reason=DenialReason.BUSY, detail="busy")
    assert "epoch" not in error_of(await start(mesh, **LAYERS))


async def test_a_worker_that_nobody_serves_or_that_breaks_is_told_apart(mesh: Mesh, owners: Owners) -> None:
    await tell_placement(mesh, told(at_home(), moves=(record(),)))
    calls = (("POST", MIGRATIONS, LAYERS), ("DELETE", MIGRATIONS + "/m1", None))
    owners.breaks = True
    for method, path, body in calls:
        answer = await ask(mesh, method, path, body)
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
    await owners.leave()
    for method, path, body in calls:
        answer = await ask(mesh, method, path, body)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "worker_unreachable")
        assert "decode-0" in error_of(answer)["message"]
        assert answer.headers["retry-after"] == "2"
    assert [move["id"] for move in (await ask(mesh, "GET", MIGRATIONS)).json()["data"]] == ["m1"]


async def test_an_order_without_an_answer_may_have_begun_and_fails_where_its_owner_does_not_know_it(
    mesh: Mesh, owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations_api, "ORDER_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(migrations, "KNOWN_WITHIN_SECONDS", 0.0)
    await tell_placement(mesh, told(at_home()))
    owners.hangs = True
    begun = await start(mesh, **LAYERS)
    assert begun.status_code == 202
    assert (await ask(mesh, "GET", begun.headers["location"])).json()["phase"] == "planned"
    silent = await ask(mesh, "DELETE", begun.headers["location"])
    assert (silent.status_code, error_of(silent)["code"]) == (504, "worker_timeout")
    await tell_placement(mesh, told(HEADS_AWAY))
    found = (await ask(mesh, "GET", begun.headers["location"])).json()
    assert (found["phase"], found["error"]) == ("failed", "its home worker does not know it")


@pytest.mark.parametrize(
    ("error", "status", "code", "may_be_done"),
    [
        (NoResponders("x"), 503, "worker_unreachable", False),
        (NotConnected("the broker is away"), 503, "worker_unreachable", True),
        (Overloaded("full"), 503, "worker_unreachable", False),
        (RequestTimedOut("x"), 504, "worker_timeout", True),
        (Undecodable("versions differ"), 504, "worker_timeout", True),
        (HandlerFailed("x"), 500, "internal_error", False),
        (MessageTooLarge("s", 2, 1), 500, "internal_error", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BusError) else None,
)
def test_each_failure_of_the_bus_names_the_worker(
    error: BusError, status: int, code: str, may_be_done: bool
) -> None:
    told_error = unanswered(error, "decode-0")
    assert (told_error.status, told_error.code) == (status, code)
    assert "decode-0" in told_error.message
    assert may_have_been_done(error) is may_be_done


CANCEL_DENIALS = {
    DenialReason.NOT_FOUND: "has not begun at its home",
    DenialReason.INVALID: "for a reason",
    DenialReason.DRAINING: "for a reason",
}


@pytest.mark.parametrize("reason", CANCEL_DENIALS)
async def test_a_known_move_that_cannot_be_rolled_back_is_a_conflict(
    mesh: Mesh, owners: Owners, reason: DenialReason
) -> None:
    await tell_placement(mesh, told(at_home(), moves=(record(),)))
    owners.answer = MigrationDenied(reason=reason, detail="for a reason")
    answer = await ask(mesh, "DELETE", MIGRATIONS + "/m1")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "cannot_cancel")
    assert CANCEL_DENIALS[reason] in error_of(answer)["message"]


async def test_a_move_that_is_over_is_not_cancelled_and_it_is_told_how_it_comes_home(
    mesh: Mesh, owners: Owners
) -> None:
    moves = (done(), done(move_id="m2", is_return=True), record(MigrationPhase.FAILED, move_id="m3"))
    await tell_placement(mesh, told(at_home(), moves=moves))
    said = [error_of(await ask(mesh, "DELETE", f"{MIGRATIONS}/m{n}"))["message"] for n in (1, 2, 3)]
    assert "kvmesh migrate --return m1" in said[0]
    assert said[1].endswith("is over: done")
    assert said[2].endswith("is over: failed")
    assert owners.asked == []


async def test_of_what_cannot_come_home_it_is_told_what_can_and_whose_it_is(
    mesh: Mesh, owners: Owners
) -> None:
    async def refused(**asked: str) -> tuple[int, str, str]:
        answer = await start(mesh, **asked)
        return answer.status_code, error_of(answer)["code"], error_of(answer)["message"]

    await mesh.bus.publish(told(at_home(PREFILL)))
    await tell_placement(mesh, told(at_home()))
    at_home_words = "no module that move 'm9' brought away is away; every module is at home"
    assert await refused(return_of="m9") == (404, "module_not_found", at_home_words)
    both = {
        worker: at_home(worker).with_module(placed(whole_layers(0, 1), move_id="m"))
        for worker in (DECODE, PREFILL)
    }
    await mesh.bus.publish(told(both[PREFILL].with_module(placed(whole_layers(2, 3), DECODE, move_id="p"))))
    await tell_placement(mesh, told(both[DECODE]))
    status, _, message = await refused(return_of="m9")
    assert status == 404
    assert message.endswith(
        "what is away was brought there by m (of decode-0), m (of prefill-0), p (of prefill-0)"
    )
    status, code, message = await refused(return_of="m")
    assert (status, code) == (400, "invalid_move")
    assert "decode-0, prefill-0; name the instance" in message
    assert owners.asked == []
    owners.answer = MigrationDenied(reason=DenialReason.NOT_FOUND, detail="it is not", epoch=1)
    mistaken = await refused(instance="decode-0", return_of="p")
    assert mistaken == (
        404,
        "module_not_found",
        "what move 'p' brought away is prefill-0's; name that instance, or none",
    )


async def test_what_a_move_under_way_brings_away_is_its_owners(mesh: Mesh, owners: Owners) -> None:
    await tell_placement(mesh, told(at_home(), moves=(record(),)))
    assert (await start(mesh, return_of="m1")).status_code == 202
    assert without_ids(owners.asked) == [order(host="", returned_move_id="m1")]


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
