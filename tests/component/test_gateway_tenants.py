"""Two API keys before workers that find KV by its names, as real ones do: who gets hits, and what travels."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_mesh import BLOCK_SIZE, FINGERPRINT, MODEL, Mesh, Worker, running_gateway
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.generation import TokenDelta
from libs.kv.names import block_names, split_names
from libs.request.generation import Generation, unpack_token_ids
from libs.request.outcome import FinishReason

KEYS = ("sk-tenant-one", "sk-tenant-two")
PROMPT = [number % 1000 + 1 for number in range(100)]
NUM_FULL_TOKENS = 96


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", [settings], indirect=True, ids=[",".join(settings) or "no keys"])


class NamedKv:
    """What the mesh holds of KV, by name."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    async def behave(self, worker: Worker, generation: Generation) -> None:
        """One token, after as much of the prompt as is held was found."""
        prompt = unpack_token_ids(generation.token_ids)[: generation.num_prompt_tokens]
        names = block_names(prompt, BLOCK_SIZE, FINGERPRINT, generation.cache_salt)
        num_found = next((at for at, name in enumerate(names) if name not in self.names), len(names))
        self.names.update(names)
        delta = TokenDelta(
            generation.request_id,
            0,
            (500,),
            finish=FinishReason.LENGTH,
            num_cached_tokens=num_found * BLOCK_SIZE,
        )
        await worker.send(generation, delta)


@pytest.fixture
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    broker = MemoryBroker()
    settings = getattr(request, "param", {})
    async with running_gateway(MemoryBus(broker), MemoryBus(broker), **settings) as mesh:
        mesh.decodes[0].behaviour = NamedKv().behave
        yield mesh


async def num_cached(
    mesh: Mesh, *, key: str = "none", headers: dict[str, str] | None = None, **change: Any
) -> int:
    answer = await mesh.client(api_key=key).completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, extra_headers=headers, extra_body=change
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


@with_settings(api_key=KEYS)
async def test_a_key_finds_its_own_prefixes_and_no_other_keys(mesh: Mesh) -> None:
    one, two = KEYS
    assert await num_cached(mesh, key=one) == 0
    assert await num_cached(mesh, key=one) == NUM_FULL_TOKENS
    assert await num_cached(mesh, key=two) == 0
    assert await num_cached(mesh, key=two) == NUM_FULL_TOKENS


@with_settings(api_key=KEYS)
async def test_the_request_salt_narrows_further_within_a_key(mesh: Mesh) -> None:
    one, two = KEYS
    assert await num_cached(mesh, key=one) == 0
    assert await num_cached(mesh, key=one, cache_salt="a") == 0
    assert await num_cached(mesh, key=one, cache_salt="b") == 0
    assert await num_cached(mesh, key=one, cache_salt="a") == NUM_FULL_TOKENS
    assert await num_cached(mesh, key=two, cache_salt="a") == 0


async def test_without_keys_only_the_request_salt_counts(mesh: Mesh) -> None:
    assert await num_cached(mesh) == 0
    assert await num_cached(mesh, key="another") == NUM_FULL_TOKENS
    assert await num_cached(mesh, cache_salt="a") == 0
    assert await num_cached(mesh, key="another", cache_salt="a") == NUM_FULL_TOKENS


@with_settings(api_key=KEYS)
async def test_no_key_travels_and_the_tenants_name_is_the_same_for_all_its_requests(mesh: Mesh) -> None:
    for key in (*KEYS, *KEYS):
        await num_cached(mesh, key=key)
    generations = mesh.decodes[0].generations
    assert not any(key in repr(told) for key in KEYS for told in [*generations, *mesh.places])
    tenants = [generation.tenant for generation in generations]
    assert tenants[:2] == tenants[2:]
    assert len(set(tenants)) == 2
    assert all(tenants)


@with_settings(api_key=KEYS)
async def test_the_router_hears_the_names_that_the_workers_will_form(mesh: Mesh) -> None:
    for key in KEYS:
        await num_cached(mesh, key=key, cache_salt="a")
    for place, generation in zip(mesh.places, mesh.decodes[0].generations, strict=True):
        expected = block_names(PROMPT, BLOCK_SIZE, FINGERPRINT, generation.cache_salt)
        assert split_names(place.names) == expected
    assert mesh.places[0].names != mesh.places[1].names


async def test_a_session_is_named_by_header_or_field_and_told_to_the_router(mesh: Mesh) -> None:
    ways: list[dict[str, Any]] = [
        {"headers": {"x-session-id": "chat"}},
        {"session_id": "chat"},
        {"prompt_cache_key": "chat"},
        {"headers": {"x-session-id": "chat"}, "session_id": "other"},
        {"session_id": "chat", "prompt_cache_key": "other"},
    ]
    for way in ways:
        await num_cached(mesh, **way)
    await num_cached(mesh, session_id="other")
    await num_cached(mesh)
    *same, other, none = [place.session for place in mesh.places]
    assert len(set(same)) == 1
    assert same[0]
    assert other not in ("", same[0])
    assert none == ""


async def test_choices_of_one_prompt_are_no_hits_of_each_other(mesh: Mesh) -> None:
    assert await num_cached(mesh, n=3) == 0
    assert await num_cached(mesh, n=3) == NUM_FULL_TOKENS


async def test_prompts_of_one_request_are_counted_each(mesh: Mesh) -> None:
    client = mesh.client()
    await num_cached(mesh)
    other = [number + 7 for number in PROMPT]
    answer = await client.completions.create(model=MODEL, prompt=[PROMPT, other], max_tokens=1, n=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 200
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == NUM_FULL_TOKENS
