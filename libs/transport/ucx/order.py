"""Puts frames back into the order they were sent in: a body that is fetched ends later than a small one
behind it."""

from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """`place` what is complete under its number; what is next in line comes out, each number once."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def place(self, number: int, item: T) -> list[T]:
        """The items that are due now, in order. Raises ValueError for a number that was there before."""
        if number < self._next or number in self._early:
            raise ValueError(f"number {number} came twice")
        self._early[number] = item
        due: list[T] = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        return due

    def drain(self) -> list[T]:
        """What came early and will never be due."""
        left, self._early = list(self._early.values()), {}
        return left
