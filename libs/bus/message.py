"""Messages: their types, the subjects they travel on, and their bytes (MessagePack, encoders and decoders
built once per type)."""

import re
from functools import cache, lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from libs.bus.errors import MessageTooLarge, Undecodable

Answer = TypeVar("Answer")

_ADDRESS = re.compile(r"[A-Za-z0-9_-]+\Z")
_PRESENCE_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\Z")

_encoder = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A fact or an order, published to all subscribers of its subject.

    The subject may contain `{to}`, the incarnation that a message is addressed to.
    """

    subject: ClassVar[str]


class Request(Message, Generic[Answer], frozen=True, kw_only=True):
    """A message that is answered once. `answer` is the type (or tagged union) that the answer decodes to."""

    answer: ClassVar[Any]


class PresenceEntry(msgspec.Struct, frozen=True):
    """One change of a presence key: `value` None says that the key was deleted."""

    key: str
    value: bytes | None


@cache
def _decoder_for(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: object, subject: str, limit_bytes: int) -> bytes:
    """Raises MessageTooLarge before anything has been sent."""
    payload = _encoder.encode(message)
    if len(payload) > limit_bytes:
        raise MessageTooLarge(subject, len(payload), limit_bytes)
    return payload


def decode(payload: bytes, kind: Any) -> Any:
    """`kind` is a message type, or a tagged union of answers. Raises Undecodable."""
    try:
        return _decoder_for(kind).decode(payload)
    except msgspec.DecodeError as error:
        name = getattr(kind, "__name__", str(kind))
        raise Undecodable(f"{len(payload)} bytes are no {name}: {error}") from error


@lru_cache(maxsize=4096)
def subject_of(kind: type[Message], address: str) -> str:
    """Where messages of this type for this incarnation travel. Raises ValueError where address and type do
    not fit."""
    if "{to}" not in kind.subject:
        if address:
            raise ValueError(
                f"{kind.__name__} goes to everybody on {kind.subject}; it takes no address {address!r}"
            )
        return kind.subject
    if not _ADDRESS.match(address):
        raise ValueError(f"{kind.__name__} needs an address of letters, digits, - and _; not {address!r}")
    return kind.subject.format(to=address)


def check_presence_key(key: str) -> None:
    """Raises ValueError unless `key` is words of letters, digits, - and _, joined by dots."""
    if not _PRESENCE_KEY.match(key):
        raise ValueError(f"presence keys are letters, digits, -, _ and inner dots; not {key!r}")
