"""As much as one answer on the bus holds. Pure."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

MAX_ANSWER_BYTES = 512 * 1024
"""The broker takes messages of 1 MiB."""

Told = TypeVar("Told")


def that_fit(told: Iterable[Told]) -> tuple[Told, ...]:
    """The first of them, as many as an answer holds; one at least."""
    taken: list[Told] = []
    num_bytes = 0
    for one in told:
        num_bytes += len(msgspec.msgpack.encode(one))
        if taken and num_bytes > MAX_ANSWER_BYTES:
            break
        taken.append(one)
    return tuple(taken)
