"""Questions to the KV store. Tensors themselves go over Links (`libs.transport.frames`)."""

from typing import ClassVar

import msgspec

from libs.bus.port import Request


class PrefixHeld(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """The store holds the first `num_blocks` of the names asked for, and keeps them for `lease_seconds`."""

    num_blocks: int
    lease_seconds: float = 0.0


class FindPrefix(Request[PrefixHeld], frozen=True, kw_only=True, tag="find_prefix"):
    """How long a prefix of these blocks do you hold? `names` is the concatenation of 16-byte block names."""

    subject: ClassVar[str] = "kvmesh.store.{to}.find_prefix"
    answer: ClassVar[object] = PrefixHeld
    names: bytes
    lease: bool = True
