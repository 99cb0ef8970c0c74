"""Two API keys on a real mesh: a tenant finds what it left itself, in workers and stores, and no more."""

import json
import os
import time
from typing import Any

import httpx
import openai
import pytest
from meshes import ONE, TRACE, TWO

from black_box import Mesh, until

pytestmark = pytest.mark.system
MESH = "tenants"

PROMPT = "A list of rivers and the cities they flow through, with short notes on each of them. " * 8
HELD = "kvmesh_store_num_blocks"
MANY_TOKENS = 96
"""Fewer than the full blocks of the prompt have."""


class Tenant:
    def __init__(self, mesh: Mesh, key: str) -> None:
        self._url, self._model, self._key = mesh.url, mesh.model, key

    def ask(self, prompt: str = PROMPT, **extra: str) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were found."""
        with openai.OpenAI(base_url=self._url + "/v1", api_key=self._key, max_retries=0) as client:
            answer = client.completions.create(
                model=self._model, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra
            )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    def of_stores(self, name: str) -> int:
        """The sum of a metric over all stores."""
        return int(sum(_metric(address, name) for address in self._stores()))

    def _stores(self) -> list[str]:
        headers = {"authorization": f"Bearer {self._key}"}
        services = httpx.get(self._url + "/v1/mesh", headers=headers).raise_for_status().json()["services"]
        return [service["http_address"] for service in services if service["kind"] == "kv_store"]


def _metric(address: str, name: str) -> float:
    lines = httpx.get(address + "/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].split()[0] == name)


def test_a_tenant_hits_its_own_prefix_on_any_worker_and_never_anothers(mesh: Mesh) -> None:
    one, two = Tenant(mesh, ONE), Tenant(mesh, TWO)
    text, num_cached = one.ask()
    assert num_cached == 0
    num_blocks = MANY_TOKENS // 16
    until(lambda: one.of_stores(HELD) >= num_blocks, timeout_seconds=20, what="the store has its blocks")
    for _ in range(2):  # each of the two prefill workers
        again, num_cached = one.ask()
        assert again == text
        assert num_cached >= MANY_TOKENS
    num_held = two.of_stores(HELD)
    theirs, num_cached = two.ask()
    assert (theirs, num_cached) == (text, 0)
    what = "the store has those of both"
    until(lambda: two.of_stores(HELD) >= num_held + num_blocks, timeout_seconds=20, what=what)
    theirs, num_cached = two.ask()
    assert theirs == text
    assert num_cached >= MANY_TOKENS


def test_stores_know_no_block_by_the_names_of_two_tenants(mesh: Mesh) -> None:
    prompt = PROMPT.replace("rivers", "harbours")
    begun_ms = time.time() * 1000
    for key in (ONE, TWO):
        assert Tenant(mesh, key).ask(prompt)[1] == 0

    def lookups() -> dict[str, list[dict[str, Any]]]:
        """By tenant, what was looked up since."""
        told: dict[str, list[dict[str, Any]]] = {}
        for line in (mesh.state_dir / TRACE).read_text().splitlines():
            access = json.loads(line)
            if access.get("kind", "lookup") == "lookup" and access["timestamp"] >= begun_ms:
                told.setdefault(access["tenant"], []).append(access)
        return told

    until(lambda: len(lookups()) == 2, timeout_seconds=20, what="both tenants are in the access trace")
    one, two = lookups().values()
    assert one[0].get("num_memory_hits", 0) == two[0].get("num_memory_hits", 0) == 0
    names_of_one, names_of_two = (
        {name for line in lines for name in line["hash_ids"]} for lines in (one, two)
    )
    assert names_of_one
    assert names_of_two
    assert not names_of_one & names_of_two


def test_a_request_salt_keeps_apart_within_one_tenant(mesh: Mesh) -> None:
    one, two = Tenant(mesh, ONE), Tenant(mesh, TWO)
    prompt = PROMPT.replace("rivers", "mountains")
    text, num_cached = one.ask(prompt, cache_salt="a")
    assert num_cached == 0
    for tenant, salt in ((one, "b"), (two, "a"), (two, "")):
        theirs, num_cached = tenant.ask(prompt, cache_salt=salt)
        assert (theirs, num_cached) == (text, 0)
    assert one.ask(prompt, cache_salt="a")[1] >= MANY_TOKENS


def test_no_key_is_written_anywhere(mesh: Mesh) -> None:
    Tenant(mesh, ONE).ask("A short one, so that something is logged.")
    for folder, _, files in os.walk(mesh.state_dir):
        for file in files:
            with open(os.path.join(folder, file), "rb") as opened:
                written = opened.read()
            assert ONE.encode() not in written, file
            assert TWO.encode() not in written, file


def test_without_a_known_key_nothing_is_answered(mesh: Mesh) -> None:
    for key in ("sk-third-tenant", ONE + "x", "none"):
        with pytest.raises(openai.AuthenticationError):
            Tenant(mesh, key).ask()
