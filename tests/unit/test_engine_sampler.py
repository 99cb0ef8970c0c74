import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.sampling.sampler import NOT_FINITE, Sampled, sample
from libs.engine.scheduling.rows import Rows
from libs.engine.scheduling.sequence import Sequence
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams

VOCAB = 40
EOS = 0


def sequence(
    sampling: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = ()
) -> Sequence:
    generation = Generation("r", pack_token_ids([*prompt, *output]), len(prompt), sampling, "g", math.inf)
    return Sequence("r", generation, arrival=0, max_len=10**6, eos_ids=(EOS,))


def run(logits: torch.Tensor, sequences: list[Sequence]) -> Sampled:
    table = Rows(max_blocks=1)
    for one in sequences:
        table.take(one)
    rows = np.array([one.row for one in sequences], dtype=np.int64)
    return sample(logits.clone(), table, rows, sequences)


def choose(
    logits: torch.Tensor,
    sampling: SamplingParams,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
) -> int:
    return int(run(logits[None], [sequence(sampling, prompt, output)]).token_ids[0])


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


GREEDY = SamplingParams(temperature=0.0, max_tokens=99)


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = random_logits(0, rows=5)
    assert run(logits, [sequence(GREEDY)] * 5).token_ids.tolist() == logits.argmax(-1).tolist()


def test_one_row_that_needs_more_does_not_change_the_others() -> None:
    logits = random_logits(1, rows=4)
    noisy = sequence(SamplingParams(temperature=1.5, seed=3, top_p=0.8, presence_penalty=1.0), output=(5, 6))
    mixed = run(logits, [sequence(GREEDY), noisy, sequence(GREEDY), sequence(GREEDY)]).token_ids
    alone = run(logits[1:2], [noisy]).token_ids
    assert mixed.tolist() == [
        int(logits[0].argmax()),
        int(alone[0]),
        int(logits[2].argmax()),
        int(logits[3].argmax()),
    ]


@given(seed=st.integers(-(2**63), 2**64 - 1), num_output=st.integers(0, 20))
def test_the_choice_depends_on_seed_and_position_alone(seed: int, num_output: int) -> None:
    logits = random_logits(2)[0]
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=99)
    split_here = choose(logits, sampling, prompt=(7,) * (num_output + 1))
    split_there = choose(logits, sampling, prompt=(7,), output=(7,) * num_output)
    assert split_here == split_there


def test_random_choices_follow_the_softmax() -> None:
    logits = random_logits(3)[0]
    sequences = [sequence(SamplingParams(temperature=1.0, seed=seed)) for seed in range(4000)]
    tokens = run(logits.expand(4000, -1), sequences).token_ids
    shares = np.bincount(tokens, minlength=VOCAB) / 4000
    assert np.abs(shares - logits.softmax(-1).numpy()).max() < 0.03


def test_top_k_of_one_and_tiny_top_p_and_min_p_of_one_are_greedy() -> None:
    logits = random_logits(4)[0]
    for narrow in (SamplingParams(top_k=1), SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0)):
        for seed in range(5):
            assert choose(logits, narrow) == int(logits.argmax()), seed


def test_bias_can_force_and_forbid_a_token_and_unknown_ids_do_nothing() -> None:
    logits = random_logits(5)[0]
    best = int(logits.argmax())
    assert choose(logits, SamplingParams(temperature=0.0, logit_bias={11: 100.0})) == 11
    assert choose(logits, SamplingParams(temperature=0.0, logit_bias={best: -100.0})) != best
    assert choose(logits, SamplingParams(temperature=0.0, logit_bias={VOCAB: 100.0, -1: 100.0})) == best


def test_stop_tokens_are_held_back_until_min_tokens_are_out() -> None:
    logits = torch.zeros(VOCAB)
    logits[[EOS, 9]] = torch.tensor([9.0, 8.0])
    logits[4] = 1.0
    held = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(9,))
    assert [choose(logits, held, output=(5,) * count) for count in range(4)] == [4, 4, EOS, EOS]
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(9,), ignore_eos=True)
    assert choose(logits, ignoring) == EOS, "eos is an ordinary token here"


def test_penalties_count_output_and_repetition_also_the_prompt() -> None:
    logits = torch.zeros(VOCAB)
    logits[[1, 5, 6]] = torch.tensor([4.0, 3.9, 3.0])
    assert choose(logits, GREEDY) == 1
    assert choose(logits, SamplingParams(temperature=0.0, presence_penalty=2.0)) == 1, "only in the prompt"
    assert choose(logits, SamplingParams(temperature=0.0, repetition_penalty=2.0)) == 5
    assert choose(logits, SamplingParams(temperature=0.0, presence_penalty=0.5), output=(1,)) == 5
    frequent = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    assert choose(logits, frequent, output=(1, 1, 1, 5, 5)) == 6
    assert choose(logits, frequent, output=(1, 5, 5, 5)) == 1


@given(
    seed=st.integers(0, 1000),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=300),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, -0.3, 0.6]),
)
def test_penalties_equal_their_definition(
    seed: int, output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    logits, prompt = random_logits(seed)[0], (1, 2, 3)
    expected = logits.clone()
    for token in {*prompt, *output}:
        value = float(expected[token])
        value = value / repetition if value > 0 else value * repetition
        count = output.count(token)
        expected[token] = value - frequency * count - presence * (count > 0)
    sampling = SamplingParams(
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    grown = sequence(sampling)
    for token in output:
        grown.append(token)
    token = int(run(logits[None], [grown]).token_ids[0])
    assert float(expected[token]) == pytest.approx(float(expected.max()), abs=1e-5)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(6)
    raw = logits[0].log_softmax(-1)
    sampling = SamplingParams(temperature=0.0, logprobs=3, logit_bias={20: 100.0})
    told = run(logits, [sequence(sampling)])
    assert told.token_ids.tolist() == [20]
    logprobs = told.logprobs[0]
    assert logprobs.logprob == pytest.approx(float(raw[20]), abs=1e-5)
    assert logprobs.top_token_ids == tuple(raw.topk(3).indices.tolist())
    assert logprobs.top_logprobs == pytest.approx(raw.topk(3).values.tolist(), abs=1e-5)


def test_each_row_gets_as_many_top_logprobs_as_it_asked_for() -> None:
    asked = [None, 0, 5, 2]
    sequences = [sequence(SamplingParams(temperature=0.0, logprobs=count)) for count in asked]
    told = run(random_logits(7, rows=4), sequences).logprobs
    assert {row: len(logprobs.top_token_ids) for row, logprobs in told.items()} == {1: 0, 2: 5, 3: 2}


def test_a_row_of_nan_has_no_token_and_harms_no_other() -> None:
    logits = random_logits(8, rows=3)
    expected = int(logits[2].argmax())
    logits[0, 5] = math.nan
    logits[1] = math.nan
    noisy = sequence(SamplingParams(temperature=1.0, logprobs=2))
    told = run(logits, [sequence(GREEDY), noisy, sequence(GREEDY)])
    assert told.token_ids.tolist() == [NOT_FINITE, NOT_FINITE, expected]
