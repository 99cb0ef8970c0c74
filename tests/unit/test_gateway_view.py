"""Readiness and status, from what presence and load reports say."""

import pytest

from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import TierLoad, WorkerLoad
from libs.mesh.cluster_state import Loads
from services.gateway.mesh.view import (
    instances,
    mesh_status,
    model_filter,
    obstacles,
    serving,
    shortest_context,
)


def one(kind: ServiceKind, name: str = "", **facts: object) -> Presence:
    known: dict[str, object] = {"state": ServiceState.READY, "incarnation": name or kind.value, **facts}
    return Presence(kind=kind, name=name or kind.value, **known)  # type: ignore[arg-type]  # facts by name


ROUTER = one(ServiceKind.ROUTER)
PREFILL = one(ServiceKind.PREFILL_WORKER, model_fingerprint="f")
DECODE = one(ServiceKind.DECODE_WORKER, model_fingerprint="f")
BOTH = one(ServiceKind.DECODE_WORKER, "both", model_fingerprint="f", runs_prompts=True)
OTHER_MODEL = one(ServiceKind.PREFILL_WORKER, "other", model_fingerprint="g")
LOADING = one(ServiceKind.DECODE_WORKER, "slow", state=ServiceState.STARTING, detail="weights 40%")


@pytest.mark.parametrize("services", [[ROUTER, PREFILL, DECODE], [ROUTER, BOTH], [ROUTER, BOTH, OTHER_MODEL]])
def test_a_usable_pair_and_a_router_are_enough(services: list[Presence]) -> None:
    assert obstacles(services) == []


@pytest.mark.parametrize(
    ("services", "reason"),
    [
        ([], "no decode worker is ready"),
        ([ROUTER, PREFILL], "no decode worker is ready"),
        ([ROUTER, DECODE], "no prefill worker is ready"),
        (
            [ROUTER, DECODE, OTHER_MODEL],
            "no prefill and decode worker have the same model, dtype and block layout",
        ),
        ([ROUTER, PREFILL, LOADING], "slow is starting: weights 40%"),
        ([PREFILL, DECODE], "no router is ready"),
    ],
)
def test_what_is_missing_is_said(services: list[Presence], reason: str) -> None:
    assert reason in obstacles(services)


def test_the_context_is_the_shortest_of_the_ready_workers() -> None:
    workers = [
        one(ServiceKind.DECODE_WORKER, "a", max_model_len=100),
        one(ServiceKind.PREFILL_WORKER, "b", max_model_len=50),
        one(ServiceKind.DECODE_WORKER, "c", max_model_len=10, state=ServiceState.DRAINING),
        one(ServiceKind.GATEWAY, "g", max_model_len=5),
    ]
    assert shortest_context(workers) == 50
    assert shortest_context([]) is None


def test_workers_of_other_models_do_not_count_where_some_are_of_ours() -> None:
    ours, theirs = (
        one(ServiceKind.DECODE_WORKER, "a", model="m"),
        one(ServiceKind.DECODE_WORKER, "b", model="n"),
    )
    assert model_filter([ours, theirs], "m") == "m"
    assert serving([ROUTER, ours, theirs], "m") == [ROUTER, ours]
    assert model_filter([theirs], "m") == ""
    assert serving([ROUTER, theirs], "") == [ROUTER, theirs]


def report(sequence: int, num_running: int) -> LoadReport:
    load = WorkerLoad(num_running=num_running, recent_request_ids=("secret",), ended_request_ids=("secret",))
    return LoadReport(kind=DECODE.kind, incarnation=DECODE.incarnation, sequence=sequence, load=load)


def test_the_status_tells_each_service_with_its_newest_load_and_the_sums() -> None:
    loads = Loads()
    loads.hear(report(2, 5), 10.0)
    loads.hear(report(1, 9), 10.5)
    status = mesh_status([ROUTER, DECODE], loads, 11.0)
    decode, router = status["services"]
    assert (decode["name"], decode["state"], decode["kind"]) == ("decode_worker", "ready", "decode_worker")
    assert (decode["load"]["num_running"], decode["load_age_seconds"]) == (5, 1.0)
    assert "secret" not in str(status)
    assert router["load"] is None
    assert status["totals"]["num_running"] == 5


def test_only_stores_tell_of_tiers() -> None:
    tier = TierLoad(
        tier="dram", num_blocks=1, num_bytes=2, capacity_bytes=3, num_hit_blocks=4, num_asked_blocks=5
    )
    store, loads = one(ServiceKind.KV_STORE), Loads()
    load = WorkerLoad(num_blocks=9, tiers=(tier,))
    loads.hear(LoadReport(kind=store.kind, incarnation=store.incarnation, sequence=1, load=load), 0.0)
    loads.hear(report(1, 5), 0.0)
    status = mesh_status([DECODE, store], loads, 0.0)
    worker, told = status["services"]
    assert "tiers" not in worker["load"]
    assert told["load"]["tiers"][0]["capacity_bytes"] == 3
    assert status["totals"]["num_blocks"] == 0


def test_a_worker_that_left_leaves_no_load() -> None:
    loads = Loads()
    loads.hear(report(1, 5), 0.0)
    loads.forget(DECODE.incarnation)
    assert loads.get(DECODE.incarnation) is None


def test_health_lists_workers_with_state_and_reason() -> None:
    assert [(i["name"], i["state"], i["reason"]) for i in instances([ROUTER, LOADING])] == [
        ("slow", "starting", "weights 40%")
    ]
