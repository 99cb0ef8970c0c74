"""The official client against a gateway on the in-memory bus."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from gateway_mesh import MODEL, Mesh, running_gateway, say, tokenizer, words
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.request.generation import unpack_token_ids
from libs.request.outcome import FinishReason
from services.gateway.api.auth import ANONYMOUS, salt_of

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    broker = MemoryBroker()
    async with running_gateway(MemoryBus(broker), MemoryBus(broker)) as mesh:
        yield mesh


def decode_side(mesh: Mesh, text: str, finish: FinishReason = FinishReason.LENGTH) -> None:
    mesh.decodes[0].behaviour = say(text, finish)


async def test_a_chat_is_answered_whole_with_usage(mesh: Mesh) -> None:
    decode_side(mesh, "Hello there, friend.", FinishReason.STOP)
    answer = await mesh.client().chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Hello there, friend."
    assert answer.choices[0].finish_reason == "stop"
    generation = mesh.decodes[0].generations[0]
    prompt = tokenizer().decode(unpack_token_ids(generation.token_ids), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == generation.num_prompt_tokens
    assert answer.usage.completion_tokens == len(words("Hello there, friend.")) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert mesh.prefills[0].prompts == [generation.request_id]


async def test_a_streamed_chat_is_the_same_text(mesh: Mesh) -> None:
    decode_side(mesh, "Grüße aus Köln \U0001f600!")
    stream = await mesh.client().chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Grüße aus Köln \U0001f600!"
    assert not any("\ufffd" in text for text in texts)
    assert [c.choices[0].finish_reason for c in chunks if c.choices if c.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_each_choice_has_its_own_seed_and_the_prompt_counts_once(mesh: Mesh) -> None:
    answer = await mesh.client().chat.completions.create(
        model=MODEL, messages=HI, n=3, seed=7, max_completion_tokens=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    generations = mesh.decodes[0].generations
    assert sorted(g.sampling.seed for g in generations) == [7, 8, 9]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == generations[0].num_prompt_tokens
    assert answer.usage.completion_tokens == 6


async def test_without_a_seed_one_is_drawn(mesh: Mesh) -> None:
    for _ in range(2):
        await mesh.client().completions.create(model=MODEL, prompt="x", max_tokens=1)
    first, second = (g.sampling.seed for g in mesh.decodes[0].generations)
    assert first != second


async def test_streamed_choices_are_told_apart(mesh: Mesh) -> None:
    decode_side(mesh, "one two three")
    stream = await mesh.client().completions.create(model=MODEL, prompt=["a", "b"], n=2, stream=True)
    texts: dict[int, str] = {}
    async for chunk in stream:
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == dict.fromkeys(range(4), "one two three")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_over_tokens_cuts_text_and_aborts_the_worker(mesh: Mesh, stream: bool) -> None:
    decode_side(mesh, "The quick brown fox jumps over the lazy dog")
    stops = ["lazy", "own fox ju", "never"]
    client = mesh.client()
    if stream:
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                model=MODEL, prompt="x", max_tokens=40, stop=stops, stream=True
            )
        ]
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=40, stop=stops)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == ("The quick br", "stop")
    async with asyncio.timeout(5):
        await mesh.decodes[0].saw_abort.wait()


async def test_chat_logprobs_join_to_the_text_and_count_as_the_usage(mesh: Mesh) -> None:
    decode_side(mesh, "Köln \U0001f600 END and more")
    answer = await mesh.client().chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=2, stop="END", stream=False
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == "Köln \U0001f600 "
    joined = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert joined.decode() == answer.choices[0].message.content
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)


async def test_completion_logprobs_stream_with_rising_offsets(mesh: Mesh) -> None:
    decode_side(mesh, "alpha beta gamma")
    stream = await mesh.client().completions.create(
        model=MODEL, prompt="x", max_tokens=40, logprobs=1, stop=["gamma"], stream=True
    )
    text, tokens, offsets = "", list[str](), list[int]()
    async for chunk in stream:
        text += chunk.choices[0].text
        if logprobs := chunk.choices[0].logprobs:
            tokens += logprobs.tokens or []
            offsets += logprobs.text_offset or []
    assert text == "alpha beta "
    assert "".join(tokens) == text
    assert offsets == sorted(offsets)


async def test_prompts_may_be_texts_and_tokens_and_echo_repeats_them(mesh: Mesh) -> None:
    client = mesh.client()
    answer = await client.completions.create(
        model=MODEL, prompt=["The sky", "Water"], echo=True, max_tokens=3
    )
    first = "".join(tokenizer().decode([t]) for t in words("Hello there.")[:3])
    assert [choice.text for choice in answer.choices] == ["The sky" + first, "Water" + first]
    by_tokens = await client.completions.create(model=MODEL, prompt=words("The sky"), echo=True, max_tokens=3)
    assert by_tokens.choices[0].text == "The sky" + first
    lists = await client.completions.create(model=MODEL, prompt=[words("a"), words("b")], max_tokens=3)
    assert len(lists.choices) == 2
    assert unpack_token_ids(mesh.decodes[0].generations[-1].token_ids) in (words("a"), words("b"))


async def test_completions_default_to_sixteen_tokens_and_chat_to_the_rest_of_the_context(mesh: Mesh) -> None:
    await mesh.client().completions.create(model=MODEL, prompt="x")
    await mesh.client().chat.completions.create(model=MODEL, messages=HI)
    text, chat = mesh.decodes[0].generations
    assert text.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == 8192 - chat.num_prompt_tokens


async def test_extensions_travel_in_the_body(mesh: Mesh) -> None:
    extensions = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "stop_token_ids": [9],
        "min_tokens": 1,
        "ignore_eos": True,
        "cache_salt": "s",
    }
    await mesh.client().completions.create(
        model=MODEL, prompt="x", extra_body=extensions, logit_bias={"5": -100}
    )
    generation = mesh.decodes[0].generations[0]
    sampling = generation.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.2)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((9,), 1, True)
    assert (sampling.logit_bias, generation.cache_salt) == ({5: -100.0}, salt_of(ANONYMOUS, "s"))


async def test_models_tokenize_and_detokenize(mesh: Mesh) -> None:
    models = await mesh.client().models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await mesh.client().models.retrieve(MODEL)).id == MODEL
    async with mesh.http() as http:
        tokens = (await http.post("/tokenize", json={"model": MODEL, "prompt": "The sky is blue"})).json()
        assert tokens["tokens"] == words("The sky is blue")
        assert tokens["count"] == len(tokens["tokens"])
        text = (await http.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})).json()
        assert text == {"prompt": "The sky is blue"}
        chat = (await http.post("/tokenize", json={"messages": HI})).json()
        assert chat["count"] > 10


async def test_long_prompts_are_tokenized_off_the_loop_and_served(mesh: Mesh) -> None:
    prompt = "word " * 5000
    answer = await mesh.client().completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(words(prompt))


async def test_health_mesh_metrics_and_openapi_tell_what_is_there(mesh: Mesh) -> None:
    await mesh.client().completions.create(model=MODEL, prompt="x", max_tokens=2)
    async with mesh.http() as http:
        assert (await http.get("/live")).json() == {"status": "live"}
        assert (await http.get("/ready")).status_code == 200
        health = (await http.get("/health")).json()
        assert {i["name"] for i in health["instances"]} == {"prefill-0", "decode-0"}
        services = (await http.get("/v1/mesh")).json()["services"]
        assert {s["kind"] for s in services} == {"gateway", "router", "prefill_worker", "decode_worker"}
        assert "/v1/chat/completions" in (await http.get("/openapi.json")).json()["paths"]
    assert await mesh.metric("kvmesh_generation_tokens_total") == 2
    assert await mesh.metric('kvmesh_request_success_total{finished_reason="length"}') == 1
    assert await mesh.metric("kvmesh_num_requests_running") == 0
    assert await mesh.metric("kvmesh_time_to_first_token_seconds_count") == 1


async def test_blocks_that_the_decode_worker_has_are_not_handed_over(mesh: Mesh) -> None:
    mesh.decodes[0].num_cached_blocks = 3
    async with mesh.http() as http:
        assert (await http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})).status_code == 200
    assert mesh.prefills[0].first_blocks == [3]


async def test_the_trace_of_the_client_goes_on_to_router_and_workers(mesh: Mesh) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": traceparent}
    await mesh.client().completions.create(model=MODEL, prompt="x", max_tokens=1, extra_headers=headers)
    assert mesh.places[0].traceparent == traceparent
    assert mesh.decodes[0].generations[0].traceparent == traceparent


async def test_each_answer_has_an_id_that_names_its_sequences(mesh: Mesh) -> None:
    answer = await mesh.client().completions.with_raw_response.create(
        model=MODEL, prompt="x", n=2, max_tokens=1
    )
    answer_id = answer.parse().id
    assert answer.headers["x-request-id"] == answer_id
    assert all(g.request_id.startswith(answer_id) for g in mesh.decodes[0].generations)
