"""Questions and orders to KV stores. Tensors themselves go over Links (`libs.transport.frames`)."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from libs.bus.message import Message, Request


class PrefixHeld(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """For each run asked for: how many of its first blocks the store holds, and how many of those are in
    memory (the rest is on disk and on its way into memory). They are kept for `lease_seconds`."""

    num_blocks: tuple[int, ...]
    num_in_memory: tuple[int, ...]
    lease_seconds: float = 0.0


class FindPrefix(Request[PrefixHeld], frozen=True, kw_only=True, tag="find_prefix"):
    """How much of these runs of blocks do you hold? `names` is the concatenation of 16-byte block names.

    A run is a part of one chain of blocks; a chain is spread run by run over all stores.
    """

    subject: ClassVar[str] = "kvmesh.store.{to}.find_prefix"
    answer: ClassVar[object] = PrefixHeld
    names: bytes
    run_lengths: tuple[int, ...]
    """Blocks of each run, in the order of `names`."""
    run_starts: tuple[int, ...] = ()
    """Where in the chain each run begins, in blocks, for the access trace; empty where that is not told."""
    lease: bool = True
    request_id: str = ""
    num_tokens: int = 0
    """Of the whole prompt, for the access trace; 0 where no prompt wants these blocks."""
    tenant: str = ""
    """Who asks, as an opaque short name; for the access trace."""


class BlocksCorrupt(Message, frozen=True, kw_only=True, tag="blocks_corrupt"):
    """Some of these blocks came with another checksum: look at yours. Addressed to a store, which believes
    only what it finds itself. `names` is the concatenation of 16-byte block names."""

    subject: ClassVar[str] = "kvmesh.store.{to}.blocks_corrupt"
    names: bytes


TtlSeconds = Annotated[float, Meta(ge=0)]
"""Below zero it would drop what is in use, by whoever subtracted two times."""


class GroupTtls(Message, frozen=True, kw_only=True, tag="group_ttls"):
    """How long stores keep unused blocks of each group: a group is the subtree under one block of a chain.

    A higher epoch replaces all that was said before; a lower or equal one changes nothing.
    """

    subject: ClassVar[str] = "kvmesh.store.group_ttls"
    epoch: int
    rest_ttl_seconds: TtlSeconds | None = None
    """Of blocks in no group; None: until they are evicted."""
    ttl_seconds: dict[bytes, TtlSeconds] = msgspec.field(default_factory=dict[bytes, float])
    """By the name of the subtree's first block. A block belongs to its nearest such ancestor, or itself."""
