"""The official client drives the real mesh."""

import openai
import pytest

from black_box import SMOLLM2 as MODEL
from black_box import Mesh

pytestmark = pytest.mark.system
MESH = "smollm2"

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one short sentence."}]


def test_a_chat_answers_with_text_and_usage(mesh: Mesh) -> None:
    answer = mesh.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=32
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same_as_a_whole_one(mesh: Mesh) -> None:
    client = mesh.client()
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_seed_repeats_a_sampled_text_and_another_seed_changes_it(mesh: Mesh) -> None:
    def sample(seed: int) -> str:
        answer = mesh.client().completions.create(
            model=MODEL, prompt="Once upon a time", temperature=1.0, seed=seed, max_tokens=24
        )
        return answer.choices[0].text

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


def test_completions_take_text_tokens_and_lists_of_both(mesh: Mesh) -> None:
    client = mesh.client()
    texts = ["Grass is", "Water boils at"]
    by_text = client.completions.create(model=MODEL, prompt=texts, temperature=0, max_tokens=8)
    tokens = [
        client.post("/../tokenize", body={"model": MODEL, "prompt": text}, cast_to=dict)["tokens"]  # type: ignore[index]
        for text in texts
    ]
    by_tokens = client.completions.create(model=MODEL, prompt=tokens, temperature=0, max_tokens=8)
    assert [c.text for c in by_text.choices] == [c.text for c in by_tokens.choices]
    assert [c.index for c in by_text.choices] == [0, 1]
    single = client.completions.create(model=MODEL, prompt=tokens[0], temperature=0, max_tokens=8, echo=True)
    assert single.choices[0].text == texts[0] + by_text.choices[0].text


def test_logprobs_join_to_the_text_and_name_the_greedy_token_first(mesh: Mesh) -> None:
    answer = mesh.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode()
    assert text.startswith(answer.choices[0].message.content or "")
    for token in logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3


def test_n_choices_differ_when_sampled_and_agree_when_greedy(mesh: Mesh) -> None:
    client = mesh.client()
    greedy = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, n=3)
    assert len({c.message.content for c in greedy.choices}) == 1
    sampled = client.completions.create(
        model=MODEL, prompt="My favourite", temperature=1.2, max_tokens=16, n=3, seed=1
    )
    assert len({c.text for c in sampled.choices}) > 1


def test_a_stop_string_cuts_the_text_at_its_earliest_place(mesh: Mesh) -> None:
    client = mesh.client()
    free = client.completions.create(model=MODEL, prompt="Count: 1, 2, 3,", temperature=0, max_tokens=32)
    text = free.choices[0].text
    stop = text[5:9]
    cut = client.completions.create(
        model=MODEL, prompt="Count: 1, 2, 3,", temperature=0, max_tokens=32, stop=["never said", stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_repeated_prompt_is_served_from_the_cache_with_the_same_text(mesh: Mesh) -> None:
    prompt = "A list of rivers and the cities they flow through, with short notes on each of them. " * 6
    client = mesh.client()
    cold = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=16)
    warm = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=16)
    assert warm.choices[0].text == cold.choices[0].text
    assert warm.usage is not None
    assert warm.usage.prompt_tokens_details is not None
    assert (warm.usage.prompt_tokens_details.cached_tokens or 0) >= 48


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "gpt-17"}, 404, "model_not_found"),
        ({"messages": []}, 400, None),
        ({"temperature": -1}, 400, None),
        ({"max_tokens": 0}, 400, None),
        ({"n": 10_000}, 400, None),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, None),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, 400, "context_length_exceeded"),
    ],
)
def test_bad_input_is_refused_in_the_openai_shape(
    mesh: Mesh, change: dict[str, object], status: int, code: str | None
) -> None:
    body: dict[str, object] = {"model": MODEL, "messages": QUESTION, "max_tokens": 4} | change
    with pytest.raises(openai.APIStatusError) as refused:
        mesh.client().post("/chat/completions", body=body, cast_to=dict)
    assert refused.value.status_code == status
    assert isinstance(refused.value.body, dict)
    assert set(refused.value.body) >= {"message", "type", "param", "code"}
    if code:
        assert refused.value.code == code
    assert mesh.client().chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2).choices


def test_the_model_is_listed(mesh: Mesh) -> None:
    assert MODEL in [model.id for model in mesh.client().models.list()]
