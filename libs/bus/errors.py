"""The bus's errors, and those of them that travel back to the asker."""


class BusError(Exception):
    """The root of the bus's errors.

    NotConnected, NoResponders, RequestTimedOut, MessageTooLarge, Undecodable, HandlerFailed, Overloaded,
    PresenceUnavailable
    """


class NotConnected(BusError):
    """The broker is away; raised at once instead of waiting for the timeout.

    Also raised for a request in flight when the connection breaks: its answer is lost, so it may or may not
    have been acted on.
    """


class NoResponders(BusError):
    """Nobody serves this request: the incarnation addressed is gone."""


class RequestTimedOut(BusError):
    """No answer within `timeout_seconds`."""


class MessageTooLarge(BusError):
    """The encoded message exceeds the broker's max_payload; carries both sizes."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"message for {subject} has {size_bytes} bytes, the broker's max_payload is {limit_bytes}"
        )
        self.subject, self.size_bytes, self.limit_bytes = subject, size_bytes, limit_bytes


class Undecodable(BusError):
    """The peer sent something that is not the expected type: versions differ, or a stranger uses the
    subject."""


class HandlerFailed(BusError):
    """The peer's handler raised, or its answer could not be sent. The peer has logged why."""


class Overloaded(BusError):
    """A bounded queue is full: the peer's requests, or what waits here for the broker. Try again later."""


class PresenceUnavailable(BusError):
    """The broker keeps no presence and no leases: JetStream is off, still starting, or refuses the entry."""


_TRAVELLING_ERRORS: dict[str, type[BusError]] = {
    kind.__name__: kind for kind in (HandlerFailed, NoResponders, Overloaded, Undecodable)
}


def error_named(name: str, text: str) -> BusError:
    """The error that a peer refused with; a name that is not known here is a HandlerFailed."""
    return _TRAVELLING_ERRORS.get(name, HandlerFailed)(text)
