"""The stop matcher against the plain definition: cut where the earliest stop string begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.generation.text import StopStrings


def cut(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def stream(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher, given_out = StopStrings(stops), ""
    for piece in pieces:
        given_out += matcher.push(piece)
        if matcher.stopped:
            return given_out, True
    return given_out + matcher.finish(), matcher.stopped


few_letters = st.text(alphabet="ab c", max_size=24)


@given(pieces=st.lists(few_letters, max_size=8), stops=st.lists(few_letters.filter(bool), max_size=4))
def test_any_split_of_a_text_gives_the_text_cut_at_its_earliest_stop(
    pieces: list[str], stops: list[str]
) -> None:
    whole = "".join(pieces)
    text, stopped = stream(pieces, stops)
    assert text == cut(whole, stops)
    assert stopped == any(stop in whole for stop in stops)


@given(text=few_letters, stops=st.lists(few_letters.filter(bool), min_size=1, max_size=4), order=st.randoms())
def test_the_order_of_the_stops_does_not_matter(text: str, stops: list[str], order: object) -> None:
    shuffled = list(stops)
    order.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis types its Random as object
    assert stream(list(text), stops) == stream(list(text), shuffled)


@given(text=few_letters, stops=st.lists(few_letters.filter(bool), min_size=1, max_size=4))
def test_nothing_that_was_given_out_is_ever_part_of_a_stop(text: str, stops: list[str]) -> None:
    matcher, given_out = StopStrings(stops), ""
    for letter in text:
        given_out += matcher.push(letter)
        assert not any(stop in given_out for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello world", ["wor"], "hello "),
        ("abc d", ["b", "abc d"], ""),
        ("abc e", ["b", "abc d"], "a"),
        ("aaab", ["aab"], "a"),
        ("ab", ["abc", "b"], "a"),
        ("no stop", ["stops"], "no stop"),
        ("né\U0001f600fin", ["\U0001f600"], "né"),
    ],
)
def test_overlapping_stops_are_cut_at_the_earliest_beginning(
    text: str, stops: list[str], expected: str
) -> None:
    assert stream(list(text), stops)[0] == expected
    assert stream([text], stops)[0] == expected


def test_text_that_cannot_become_a_stop_is_given_out_at_once() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("The E") == "The "
    assert matcher.push("gg") == "Egg"


def test_after_the_stop_nothing_comes_out() -> None:
    matcher = StopStrings(["x"])
    assert matcher.push("ax") == "a"
    assert (matcher.stopped, matcher.push("b"), matcher.finish()) == (True, "", "")
