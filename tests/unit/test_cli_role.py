"""A role is ordered with the admin key, and waited for until the worker is ready in it."""

import io
import json
from typing import Any

import httpx
import pytest

from services.cli.__main__ import main
from services.cli.gateway import Gateway, GatewayError
from services.cli.role import change_role, role_of

ACCEPTED = {"name": "decode-0", "incarnation": "ab", "role": "prefill"}


def service(state: str, kind: str, **facts: Any) -> dict[str, Any]:
    return {"name": "decode-0", "incarnation": "ab", "state": state, "kind": kind, **facts}


class Mesh:
    """A gateway whose mesh looks each time as the next of `looks`."""

    def __init__(self, *looks: list[dict[str, Any]]) -> None:
        self.looks = list(looks)
        self.asked: list[tuple[str, str, bytes, str]] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"services": self.looks.pop(0)})
        key = request.headers.get("authorization", "")
        self.asked.append((request.method, request.url.raw_path.decode(), request.content, key))
        return httpx.Response(202, json=ACCEPTED)

    def run(self, worker: str = "decode-0", *, waits: bool, as_json: bool = False) -> str:
        gateway, out = (
            Gateway("http://mesh", "", httpx.MockTransport(self.answer), admin_key="adm"),
            io.StringIO(),
        )
        change_role(
            gateway, worker, "prefill", waits=waits, as_json=as_json, out=out, pause=lambda seconds: None
        )
        gateway.close()
        return out.getvalue()


def test_it_is_ordered_with_the_admin_key_and_not_waited_for() -> None:
    mesh = Mesh()
    assert mesh.run("a/b", waits=False) == "decode-0 ends its work, then has the role prefill\n"
    ((method, path, body, key),) = mesh.asked
    assert (method, path, key) == ("POST", "/v1/mesh/workers/a%2Fb/role", "Bearer adm")
    assert json.loads(body) == {"role": "prefill"}


def test_it_is_waited_for_until_the_worker_is_ready_in_that_role() -> None:
    mesh = Mesh(
        [service("ready", "decode_worker")],
        [service("draining", "decode_worker")],
        [service("draining", "prefill_worker")],
        [service("ready", "prefill_worker")],
    )
    assert mesh.run(waits=True).startswith("decode-0 has the role prefill after 0.")
    assert mesh.looks == []


def test_for_programs_it_is_what_the_gateway_said() -> None:
    assert json.loads(Mesh().run(waits=False, as_json=True)) == ACCEPTED


def test_a_worker_that_leaves_meanwhile_is_an_error() -> None:
    with pytest.raises(GatewayError, match="decode-0 has left the mesh"):
        Mesh([service("draining", "decode_worker")], []).run(waits=True)


@pytest.mark.parametrize(
    ("facts", "role"),
    [
        ({"kind": "prefill_worker", "runs_prompts": False}, "prefill"),
        ({"kind": "decode_worker", "runs_prompts": False}, "decode"),
        ({"kind": "decode_worker", "runs_prompts": True}, "both"),
        ({"kind": "router"}, ""),
    ],
)
def test_the_role_is_read_off_the_mesh(facts: dict[str, Any], role: str) -> None:
    assert role_of(facts) == role


@pytest.mark.parametrize("words", [["role"], ["role", "decode-0"], ["role", "decode-0", "router"]])
def test_words_that_are_no_order_end_the_command(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
