"""One sequence over its attempts: order, gaps, duplicates, one outcome."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.generation import TokenDelta
from libs.request.generation import num_tokens, unpack_token_ids
from libs.request.outcome import FailureReason, FinishReason
from libs.request.sampling import SamplingParams
from services.gateway.generation.sequence import Failed, Finished, GenerationRequest, Interruption, Sequence
from services.gateway.generation.text import SequenceText
from services.gateway.metrics import Times


class Letters:
    """A detokenizer whose tokens are letters."""

    def push(self, token_ids: list[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids)

    def finish(self) -> str:
        return ""


@dataclass
class Heard:
    text: str = ""
    ends: list[FinishReason] = field(default_factory=list)

    def take(self, sequence: Sequence, delta: TokenDelta, now: float) -> int:
        """Give the delta to the sequence and keep what it adds; how many tokens it brought."""
        had = len(sequence.output)
        added = sequence.accept(delta, now)
        if added is not None:
            assert not self.ends, "nothing may come after the end"
            self.text += added.text
            if added.finish is not None:
                self.ends.append(added.finish)
        return len(sequence.output) - had


REQUEST = GenerationRequest(answer_id="s", arrived_seconds=0, deadline_unix_seconds=0, format=None)


def new_sequence(*, max_tokens: int = 100, stops: tuple[str, ...] = ()) -> Sequence:
    return Sequence(
        request=REQUEST,
        choice=0,
        prompt=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens),
        text=SequenceText(Letters(), stops=stops),
        times=Times(arrived=0),
    )


def begin(sequence: Sequence) -> str:
    return sequence.begin_attempt(lambda: None).request_id


def delta(request_id: str, index: int, text: str, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(request_id, index, tuple(map(ord, text)), finish=finish)


def test_tokens_are_delivered_in_order_and_the_end_once() -> None:
    sequence, heard = new_sequence(), Heard()
    attempt = begin(sequence)
    assert heard.take(sequence, delta(attempt, 0, "ab"), 1.0) == 2
    assert heard.take(sequence, delta(attempt, 2, "c", FinishReason.LENGTH), 2.0) == 1
    assert (heard.text, heard.ends, sequence.outcome) == (
        "abc",
        [FinishReason.LENGTH],
        Finished(FinishReason.LENGTH),
    )
    assert heard.take(sequence, delta(attempt, 3, "d"), 3.0) == 0
    assert (sequence.times.first_token, sequence.times.last_token) == (1.0, 2.0)


def test_the_token_that_ends_the_text_is_counted_and_not_shown() -> None:
    sequence, heard = new_sequence(), Heard()
    heard.take(sequence, delta(begin(sequence), 0, "ab$", FinishReason.STOP), 1.0)
    assert (heard.text, len(sequence.output)) == ("ab", 3)


def test_a_gap_interrupts_and_delivers_nothing() -> None:
    heard, over = Heard(), [0]
    sequence, heard = new_sequence(), Heard()
    attempt = sequence.begin_attempt(lambda: over.append(1))
    heard.take(sequence, delta(attempt.request_id, 0, "a"), 1.0)
    heard.take(sequence, delta(attempt.request_id, 2, "c"), 2.0)
    assert heard.text == "a"
    assert sequence.outcome is None
    assert attempt.interruption is not None
    assert attempt.interruption.reason is FailureReason.PEER_LOST
    assert over == [0, 1]


def test_tokens_that_came_already_are_skipped() -> None:
    sequence, heard = new_sequence(), Heard()
    attempt = begin(sequence)
    heard.take(sequence, delta(attempt, 0, "abc"), 1.0)
    assert heard.take(sequence, delta(attempt, 1, "bcd"), 2.0) == 1
    assert heard.text == "abcd"


def test_a_second_attempt_goes_on_from_the_tokens_so_far_under_a_new_id() -> None:
    heard = Heard()
    sequence = new_sequence()
    first = begin(sequence)
    heard.take(sequence, delta(first, 0, "ab"), 1.0)
    sequence.interrupt(Interruption(FailureReason.PEER_LOST, "gone", lost="w"))
    second = sequence.begin_attempt(lambda: None)
    generation = sequence.generation(second, "gateway-1")
    assert second.request_id != first
    assert unpack_token_ids(generation.token_ids) == [1, 2, 3, ord("a"), ord("b")]
    assert (num_tokens(generation), generation.num_prompt_tokens) == (5, 3)
    heard.take(sequence, delta(second.request_id, 2, "c", FinishReason.STOP), 2.0)
    assert heard.ends == [FinishReason.STOP]


def first_delta(request_id: str, index: int, num_cached_tokens: int) -> TokenDelta:
    return TokenDelta(request_id, index, (65,), num_cached_tokens=num_cached_tokens)


def test_a_replay_finds_the_kv_of_the_attempt_before_which_is_no_cache_hit_of_the_client() -> None:
    sequence, heard = new_sequence(), Heard()
    heard.take(sequence, first_delta(begin(sequence), 0, num_cached_tokens=1), 1.0)
    sequence.interrupt(Interruption(FailureReason.PEER_LOST, "gone"))
    heard.take(sequence, first_delta(begin(sequence), 1, num_cached_tokens=4), 2.0)
    assert sequence.num_cached_tokens == 1


def test_an_attempt_that_gave_nothing_tells_nothing_of_cached_tokens() -> None:
    sequence, heard = new_sequence(), Heard()
    heard.take(
        sequence, TokenDelta(begin(sequence), 0, (), failure=FailureReason.CORRUPT, num_cached_tokens=3), 1.0
    )
    heard.take(sequence, first_delta(begin(sequence), 0, num_cached_tokens=2), 2.0)
    heard.take(sequence, first_delta("s-0.2", 0, num_cached_tokens=3), 2.0)
    assert sequence.num_cached_tokens == 2


def test_only_tokens_of_the_prompt_are_cached_tokens() -> None:
    sequence, heard = new_sequence(), Heard()
    heard.take(sequence, first_delta(begin(sequence), 0, num_cached_tokens=99), 1.0)
    assert sequence.num_cached_tokens == 3


def test_a_stop_string_ends_the_sequence_and_drops_the_rest_of_its_delta() -> None:
    heard = Heard()
    sequence = new_sequence(stops=("cd",))
    attempt = sequence.begin_attempt(lambda: None)
    heard.take(sequence, delta(attempt.request_id, 0, "abcdef"), 1.0)
    assert (heard.text, len(sequence.output), heard.ends) == ("ab", 4, [FinishReason.STOP])
    assert not attempt.is_ended_by_worker, "its worker must be told"


def test_held_back_text_comes_out_with_the_end() -> None:
    heard = Heard()
    sequence = new_sequence(stops=("cd",))
    heard.take(sequence, delta(begin(sequence), 0, "abc", FinishReason.LENGTH), 1.0)
    assert (heard.text, heard.ends) == ("abc", [FinishReason.LENGTH])


def test_a_stop_that_is_only_decided_at_the_end_finishes_with_stop() -> None:
    heard = Heard()
    sequence = new_sequence(stops=("b", "abcd"))
    heard.take(sequence, delta(begin(sequence), 0, "abc", FinishReason.LENGTH), 1.0)
    assert (heard.text, heard.ends) == ("a", [FinishReason.STOP])


def test_max_tokens_ends_it_even_when_the_worker_forgets_to_say_so() -> None:
    heard = Heard()
    sequence = new_sequence(max_tokens=2)
    heard.take(sequence, delta(begin(sequence), 0, "ab"), 1.0)
    assert heard.ends == [FinishReason.LENGTH]


def test_a_failure_suspects_the_prefill_worker_until_the_first_token() -> None:
    sequence, heard = new_sequence(), Heard()
    attempt = sequence.begin_attempt(lambda: None)
    attempt.prefill = "p"
    heard.take(sequence, TokenDelta(attempt.request_id, 0, (), failure=FailureReason.LEASE_EXPIRED), 1.0)
    assert attempt.interruption == Interruption(FailureReason.LEASE_EXPIRED, "", suspect="p")


@pytest.mark.parametrize("first", [Finished(FinishReason.STOP), Failed(FailureReason.DEADLINE)])
def test_only_the_first_outcome_counts(first: Finished | Failed) -> None:
    sequence = new_sequence()
    assert sequence.end(first)
    assert not sequence.end(Failed(FailureReason.ABORTED))
    assert sequence.outcome == first


def test_prefill_is_needed_until_the_first_token_and_decode_always() -> None:
    sequence, heard = new_sequence(), Heard()
    attempt = sequence.begin_attempt(lambda: None)
    attempt.prefill, attempt.decode = "p", "d"
    assert attempt.depends_on("p")
    heard.take(sequence, delta(attempt.request_id, 0, "a"), 1.0)
    assert (attempt.depends_on("p"), attempt.depends_on("d")) == (False, True)


@given(
    text=st.text(alphabet="abc", min_size=1, max_size=30),
    cuts=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=12),
)
def test_whatever_deltas_repeat_or_miss_the_text_is_a_prefix_of_the_true_one(
    text: str, cuts: list[tuple[int, int]]
) -> None:
    sequence, heard = new_sequence(), Heard()
    attempt = sequence.begin_attempt(lambda: None)
    for start, length in cuts:
        had_before = len(heard.text)
        heard.take(sequence, delta(attempt.request_id, start, text[start : start + length]), 1.0)
        if attempt.is_over:
            assert start > had_before
            attempt = sequence.begin_attempt(lambda: None)
    assert text.startswith(heard.text)
    assert [chr(token) for token in sequence.output] == list(heard.text)
