"""Whether this coordinator leads, by the lease it was last given. Pure: time and connection are told.

A lease is worth what the broker remembers, so losing the connection ends it here: the broker may have come
back empty, and given it to somebody else.
"""


class Leadership:
    """Times are monotonic seconds; a connection has a number, another one after each reconnect."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._ends_at = float("-inf")
        self._connection = -1

    def answered(self, *, is_held: bool, asked_at: float, connection: int) -> None:
        """The broker's answer to a question of this time, before which its clock has not begun to run."""
        self._ends_at = asked_at + self._lease_seconds if is_held else float("-inf")
        self._connection = connection

    def end(self) -> None:
        """It is given back."""
        self._ends_at = float("-inf")

    def is_ours(self, now: float, connection: int) -> bool:
        """Nobody else has it now."""
        return now < self._ends_at and connection == self._connection
