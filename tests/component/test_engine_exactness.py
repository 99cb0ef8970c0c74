"""Whatever is batched with what, in whatever chunks: the tokens are those of one sequence computed alone."""

import math
from typing import Any

import pytest
from engine_harness import (
    SIZE,
    alone,
    begin,
    check_baseline,
    dense,
    drain,
    engine,
    generation,
    ids,
    prompt_of,
    tiny_model,
)
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.outputs import StepOutput, TokenOutput
from libs.model.model import Model
from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FinishReason
from libs.request.sampling import SamplingParams


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def test_greedy_tokens_are_those_of_dense_attention(model: Model) -> None:
    for length in (1, 3, 4, 5, 31, 40):
        assert alone(model, generation(prompt_of(length))) == dense(model, prompt_of(length), 12), length


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_block_sizes_change_no_token_whichever_attention_takes_them(model: Model, block_size: int) -> None:
    core = engine(model, block_size=block_size, num_blocks=640 // block_size, max_num_batched_tokens=20)
    asked = [generation(prompt_of(17 + 5 * kind, kind), f"r{kind}") for kind in range(4)]
    for one in asked:
        begin(core, one)
    told = drain(core)
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)


@pytest.mark.parametrize("num_batched_tokens", [1, 3, 7, 16, 64])
def test_chunks_and_company_change_no_token(model: Model, num_batched_tokens: int) -> None:
    core = engine(model, max_num_batched_tokens=num_batched_tokens)
    asked = [generation(prompt_of(3 + 6 * kind, kind), f"r{kind}") for kind in range(6)]
    for one in asked:
        begin(core, one)
    told = drain(core)
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)
        assert [token.index for token in told[one.request_id]] == list(range(12))
        assert [token.finish for token in told[one.request_id]][-2:] == [None, FinishReason.LENGTH]
    check_baseline(core)


@given(data=st.data())
def test_preempted_sequences_lose_and_repeat_nothing(model: Model, data: st.DataObject) -> None:
    core = engine(
        model,
        num_blocks=data.draw(st.integers(12, 24)),
        max_num_batched_tokens=data.draw(st.integers(4, 40)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        prefix_cache=data.draw(st.booleans()),
    )
    asked = [
        generation(
            prompt_of(data.draw(st.integers(1, 20)), data.draw(st.integers(0, 2))),
            f"r{number}",
            max_tokens=data.draw(st.integers(1, 24)),
            temperature=data.draw(st.sampled_from([0.0, 0.9])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.4])),
            seed=number,
        )
        for number in range(6)
    ]
    told: dict[str, list[TokenOutput]] = {}
    waiting = list(asked)
    while waiting:
        if (
            core.sequences.reserve(waiting[0], waiting[0].request_id, whole_prompt=data.draw(st.booleans()))
            is not None
        ):
            core.sequences.begin(waiting.pop(0).request_id, num_computed_tokens=0)
        for token in core.step().tokens:
            told.setdefault(token.sequence_id, []).append(token)
    for name, tokens in drain(core).items():
        told.setdefault(name, []).extend(tokens)
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)
    check_baseline(core)


def test_sequences_that_outgrow_the_pool_together_all_end_right(model: Model) -> None:
    core = engine(model, num_blocks=14)
    asked = [generation(prompt_of(6, kind), f"r{kind}", max_tokens=30) for kind in range(4)]
    for one in asked:
        begin(core, one)
    preempted = 0

    def count(_: StepOutput) -> None:
        nonlocal preempted
        preempted += core.load().num_waiting

    told = drain(core, count)
    assert preempted, "the pool is too small for all at once"
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)
    check_baseline(core)


def test_one_that_outgrows_the_whole_pool_ends_with_length(model: Model) -> None:
    core = engine(model, num_blocks=5)
    begin(core, generation(prompt_of(6), max_tokens=100))
    told = drain(core)["r"]
    assert 6 + len(told) == 5 * SIZE
    assert told[-1].finish is FinishReason.LENGTH
    assert ids(told) == alone(model, generation(prompt_of(6), max_tokens=100))[: len(told)]
    check_baseline(core)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.2, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0, "presence_penalty": 1.5, "min_tokens": 9, "ignore_eos": False},
    ],
)
def test_a_replay_continues_the_same_text(model: Model, sampling: dict[str, Any]) -> None:
    prompt = prompt_of(9)
    whole = alone(model, generation(prompt, **sampling))
    for cut in range(1, len(whole)):
        core = engine(model)
        begin(core, generation(prompt, output=whole[:cut], **sampling))
        told = drain(core)["r"]
        assert ids(told) == whole[cut:]
        assert told[0].index == cut


def test_a_known_prefix_is_found_and_not_computed_again(model: Model) -> None:
    core = engine(model)
    begin(core, generation(prompt_of(18), "first"))
    first = drain(core)["first"]
    held = core.sequences.reserve(generation(prompt_of(18), "second"), "second", whole_prompt=True)
    assert held is not None
    assert held.num_cached_blocks == 4
    core.sequences.begin("second", num_computed_tokens=0)
    second = drain(core)["second"]
    assert ids(second) == ids(first)
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens, second[1].num_cached_tokens) == (
        0,
        16,
        0,
    )
    longer = generation(prompt_of(18) + ids(first)[:6], "third")
    held = core.sequences.reserve(longer, "third", whole_prompt=True)
    assert held is not None
    assert held.num_cached_blocks == 5, "output blocks are found too"
    core.sequences.abort("third")
    salted = Generation(
        "salt", pack_token_ids(prompt_of(18)), 18, SamplingParams(), "g", math.inf, cache_salt="x"
    )
    held = core.sequences.reserve(salted, "salt", whole_prompt=True)
    assert held is not None
    assert held.num_cached_blocks == 0, "another tenant finds nothing"
    core.sequences.abort("salt")
    check_baseline(core)


def test_a_prefix_computed_while_another_waits_is_found_when_that_starts(model: Model) -> None:
    core = engine(model, max_num_batched_tokens=20)
    for name in ("first", "second"):
        begin(core, generation(prompt_of(20), name))
    told = drain(core)
    assert ids(told["first"]) == ids(told["second"])
    assert told["second"][0].num_cached_tokens == 16
