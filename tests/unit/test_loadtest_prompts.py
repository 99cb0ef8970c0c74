"""Synthetic prompts: lengths, shared prefixes, turns."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.conversation import Conversation, arrivals_of, within
from loadtest.prompts import PromptShape, conversations
from loadtest.words import WORDS, text_of


def some(shape: PromptShape, num: int, seed: int = 0) -> list[Conversation]:
    return list(itertools.islice(conversations(shape, seed), num))


def words_of(conversation: Conversation, turn: int = 0) -> list[str]:
    prompt = conversation.turns[turn].prompt
    assert isinstance(prompt, str)
    return prompt.split()


@given(st.text(max_size=10), st.integers(0, 200), st.integers(0, 200))
def test_a_text_is_as_long_as_asked_and_the_start_of_a_longer_one(name: str, one: int, more: int) -> None:
    short, long = text_of(name, one), text_of(name, one + more)
    assert len(short.split()) == one
    assert long.startswith(short)
    assert set(short.split()) <= set(WORDS)


def test_other_names_are_other_texts() -> None:
    assert text_of("a", 20) != text_of("b", 20)
    assert len(set(WORDS)) == len(WORDS)


def test_the_same_seed_asks_the_same_again() -> None:
    shape = PromptShape(spread=0.5, num_turns=2)
    assert some(shape, 5, seed=3) == some(shape, 5, seed=3) != some(shape, 5, seed=4)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    asked = some(PromptShape(prefix_tokens=50, suffix_tokens=10, num_prefixes=1), 20)
    texts = [words_of(conversation) for conversation in asked]
    assert len({tuple(words[:50]) for words in texts}) == 1
    assert len({tuple(words[50:]) for words in texts}) == 20
    assert all(len(words) == 60 for words in texts)


def test_no_prefix_shares_nothing() -> None:
    texts = [words_of(c) for c in some(PromptShape(prefix_tokens=0, suffix_tokens=8), 20)]
    assert len({tuple(words) for words in texts}) == 20
    assert {len(words) for words in texts} == {8}


@pytest.mark.parametrize(("zipf", "share"), [(0.0, 1 / 4), (1.0, 1 / (1 + 1 / 2 + 1 / 3 + 1 / 4))])
def test_prefixes_are_asked_for_by_zipfs_law(zipf: float, share: float) -> None:
    shape = PromptShape(prefix_tokens=3, suffix_tokens=1, num_prefixes=4, zipf=zipf)
    counts = Counter(tuple(words_of(conversation)[:3]) for conversation in some(shape, 4000))
    assert len(counts) == 4
    first = text_of("0-prefix-0", 3).split()
    assert counts[tuple(first)] / 4000 == pytest.approx(share, abs=0.03)


@given(st.integers(1, 100), st.floats(0, 1), st.integers(0, 100))
def test_lengths_are_spread_around_what_is_asked_for(mean: int, spread: float, seed: int) -> None:
    shape = PromptShape(prefix_tokens=0, suffix_tokens=mean, output_tokens=mean, spread=spread)
    for conversation in some(shape, 5, seed):
        for length in (len(words_of(conversation)), conversation.turns[0].max_tokens):
            assert max(1, mean * (1 - spread) - 1) <= length <= mean * (1 + spread) + 1


def test_only_the_first_turn_brings_the_shared_prefix() -> None:
    (chat,) = some(PromptShape(prefix_tokens=20, suffix_tokens=5, num_turns=3, think_seconds=1.5), 1)
    assert [len(words_of(chat, turn)) for turn in range(3)] == [25, 5, 5]
    assert chat.think_seconds == 1.5


def test_a_load_ends_by_time_or_by_number() -> None:
    shape = PromptShape()
    times = [0.0, 1.0, 2.0, 3.0]

    def num(duration: float | None, most: int | None) -> int:
        planned = arrivals_of(times, conversations(shape))
        return len(list(within(planned, duration_seconds=duration, num_conversations=most)))

    assert (num(None, None), num(2.0, None), num(None, 3), num(2.0, 1), num(0.0, None)) == (4, 2, 3, 1, 0)
