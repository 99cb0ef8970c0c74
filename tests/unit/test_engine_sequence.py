import math

import numpy as np
import pytest

from libs.engine.errors import WrongState
from libs.engine.scheduling.rows import Needs, Rows
from libs.engine.scheduling.sequence import Sequence, SequenceState
from libs.kv.names import block_names
from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FinishReason
from libs.request.sampling import SamplingParams

EOS = 7


def sequence(
    sampling: SamplingParams | None = None,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    max_len: int = 100,
) -> Sequence:
    generation = Generation(
        "r",
        pack_token_ids([*prompt, *output]),
        len(prompt),
        sampling or SamplingParams(max_tokens=50),
        "g",
        math.inf,
        cache_salt="salt",
    )
    return Sequence("r", generation, arrival=0, max_len=max_len, eos_ids=(EOS,))


@pytest.mark.parametrize(
    "path",
    [
        [SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED],
        [SequenceState.LOADING, SequenceState.LOADING, SequenceState.WAITING, SequenceState.PREEMPTED],
        [SequenceState.WAITING, SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.RUNNING],
        [SequenceState.FINISHED, SequenceState.FINISHED],
    ],
)
def test_paths_through_the_states(path: list[SequenceState]) -> None:
    one = sequence()
    for state in path:
        one.go(state)
        assert one.state is state


@pytest.mark.parametrize(
    "path",
    [
        [SequenceState.RUNNING],
        [SequenceState.PREEMPTED],
        [SequenceState.WAITING, SequenceState.WAITING],
        [SequenceState.WAITING, SequenceState.LOADING],
        [SequenceState.FINISHED, SequenceState.WAITING],
    ],
)
def test_steps_that_no_state_allows_are_refused(path: list[SequenceState]) -> None:
    one = sequence()
    for state in path[:-1]:
        one.go(state)
    with pytest.raises(WrongState, match="'r' is"):
        one.go(path[-1])


def test_eos_and_stop_ids_end_with_stop() -> None:
    assert sequence().append(EOS) is FinishReason.STOP
    assert sequence(SamplingParams(stop_token_ids=(9,))).append(9) is FinishReason.STOP
    assert sequence().append(8) is None


def test_ignored_eos_and_unmet_min_tokens_do_not_end() -> None:
    assert sequence(SamplingParams(ignore_eos=True)).append(EOS) is None
    patient = sequence(SamplingParams(min_tokens=2))
    assert [patient.append(EOS) for _ in range(3)] == [None, None, FinishReason.STOP]


def test_length_ends_at_max_tokens_or_at_the_longest_that_fits() -> None:
    short = sequence(SamplingParams(max_tokens=2))
    assert [short.append(5), short.append(5)] == [None, FinishReason.LENGTH]
    assert sequence(max_len=4).append(5) is FinishReason.LENGTH


def test_a_replay_counts_the_tokens_of_earlier_attempts() -> None:
    again = sequence(SamplingParams(max_tokens=4), output=(5, 6, 5))
    assert again.num_output_tokens == 3
    assert again.append(8) is FinishReason.LENGTH


def test_penalties_of_a_replay_see_the_earlier_output() -> None:
    again = sequence(SamplingParams(frequency_penalty=1.0), output=(5, 6, 5))
    assert again.seen is not None
    counts = dict(zip(again.seen.ids.tolist(), again.seen.counts.tolist(), strict=True))
    assert counts == {1: 0, 2: 0, 3: 0, 5: 2, 6: 1}
    assert sequence().seen is None, "no penalty, no bookkeeping"


def test_names_grow_with_the_tokens_and_equal_those_of_the_whole() -> None:
    one = sequence(prompt=tuple(range(10)))
    assert len(one.name_blocks(2, "model", 4)) == 2
    for token in range(30):
        one.append(token + 8)
    whole = block_names(one.token_ids, 4, "model", "salt")
    assert one.name_blocks(10, "model", 4) == whole
    short = sequence(prompt=(1,))
    for token in range(8, 15):
        short.append(token)
    assert short.name_blocks(2, "model", 4) == block_names(short.token_ids, 4, "model", "salt")


def test_rows_say_what_choosing_a_token_takes() -> None:
    table = Rows(max_blocks=4)
    expected = {
        Needs(0): SamplingParams(temperature=0.0),
        Needs.NOISE: SamplingParams(temperature=0.5),
        Needs.EDITS: SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
        Needs.EDITS | Needs.NOISE: SamplingParams(min_tokens=1),
        Needs.LOGPROBS: SamplingParams(temperature=0.0, logprobs=0),
    }
    for needs, sampling in expected.items():
        one = sequence(sampling)
        table.take(one)
        assert Needs(int(table.needs[one.row])) == needs


def test_rows_grow_when_all_are_taken_and_are_used_again() -> None:
    table = Rows(max_blocks=4)
    sequences = [sequence(SamplingParams(seed=number), prompt=(number, 8)) for number in range(40)]
    for one in sequences:
        one.blocks = [one.token_ids[0], 99]
        table.take(one)
    rows = [one.row for one in sequences]
    assert len(set(rows)) == table.num_taken == 40
    assert table.block_tables[rows, 0].tolist() == list(range(40))
    assert table.seed[rows].tolist() == list(range(40))
    assert table.num_tokens[rows].tolist() == [2] * 40
    table.append(np.array(rows[:2]), np.array([50, 51]))
    assert table.last_token[rows[:3]].tolist() == [50, 51, 8]
    assert table.num_tokens[rows[:3]].tolist() == [3, 3, 2]
    for one in sequences:
        table.give_back(one)
        table.give_back(one)
    assert table.num_taken == 0
