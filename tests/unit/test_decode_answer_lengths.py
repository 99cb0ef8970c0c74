from hypothesis import given
from hypothesis import strategies as st

from libs.worker.decode.answer_lengths import WINDOW, AnswerLengths


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=WINDOW))
def test_few_answers_have_their_plain_mean(lengths: list[int]) -> None:
    answers = AnswerLengths()
    for length in lengths:
        answers.add(length)
    assert abs(answers.mean_tokens - sum(lengths) / len(lengths)) < 1e-6 * max(lengths)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_the_mean_follows_a_change_and_stays_between_what_it_saw(before: int, after: int) -> None:
    answers = AnswerLengths()
    for _ in range(WINDOW):
        answers.add(before)
    for _ in range(3 * WINDOW):
        answers.add(after)
    assert abs(answers.mean_tokens - after) <= 0.06 * abs(before - after) + 1e-6
    assert min(before, after) - 1e-6 <= answers.mean_tokens <= max(before, after) + 1e-6


def test_nothing_is_known_before_the_first_answer() -> None:
    assert AnswerLengths().mean_tokens == 0.0
