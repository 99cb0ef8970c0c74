"""The identity of a process: a name that people know, and an incarnation that is new at every start."""

import secrets
import socket

import msgspec

from libs.bus.messages.presence import ServiceKind

NUM_INCARNATION_DIGITS = 16


class Identity(msgspec.Struct, frozen=True):
    """`name` is stable over restarts; `incarnation` is 16 random hex digits, new at every start."""

    kind: ServiceKind
    name: str
    incarnation: str


def new_identity(kind: ServiceKind, name: str = "") -> Identity:
    """An identity for this process; without a name it gets one from its kind and host."""
    name = name or f"{kind.value.replace('_', '-')}-{socket.gethostname()}"
    return Identity(kind, name, secrets.token_hex(NUM_INCARNATION_DIGITS // 2))
