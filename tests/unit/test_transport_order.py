"""Frames come out in the order they were sent in, each once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.transport.ucx.order import InOrder


@given(st.permutations(range(12)))
def test_any_order_of_arrival_comes_out_in_order_and_as_early_as_possible(arrivals: list[int]) -> None:
    order: InOrder[str] = InOrder()
    out: list[str] = []
    for index, number in enumerate(arrivals):
        out += order.place(number, str(number))
        arrived = set(arrivals[: index + 1])
        num_due = next((n for n in range(12) if n not in arrived), 12)
        assert out == [str(n) for n in range(num_due)]
    assert order.drain() == []


@pytest.mark.parametrize("again", [0, 1, 3])
def test_a_number_that_comes_twice_is_an_error(again: int) -> None:
    order: InOrder[None] = InOrder()
    for number in (0, 1, 3):
        order.place(number, None)
    with pytest.raises(ValueError, match=f"number {again} came twice"):
        order.place(again, None)


def test_what_came_early_can_be_taken_back() -> None:
    order: InOrder[str] = InOrder()
    order.place(2, "two")
    order.place(1, "one")
    assert sorted(order.drain()) == ["one", "two"]
    assert order.drain() == []
