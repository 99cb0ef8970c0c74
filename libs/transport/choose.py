"""Which transport: by setting, one per process."""

from typing import Literal

from libs.transport.credits import LinkLimits
from libs.transport.handshake import Identity
from libs.transport.port import Transport

TransportKind = Literal["ucx", "shm"]


def make_transport(
    kind: TransportKind,
    incarnation: str,
    secret: bytes,
    *,
    limits: LinkLimits | None = None,
    idle_pool_bytes: int = 256 << 20,
) -> Transport:
    """The transport of this process.

    `incarnation` is told to peers, who prove with `secret` that they belong here. `limits` bound each Link,
    and with it the memory that a peer can make this process hold; `idle_pool_bytes` bounds the buffers kept
    for reuse. Nothing is opened before `listen` or `connect`. Raises ValueError for an empty secret or
    incarnation.
    """
    if not secret or not incarnation:
        raise ValueError("a transport needs a secret and an incarnation that are not empty")
    me = Identity(kind=kind, incarnation=incarnation, secret=secret, limits=limits or LinkLimits())
    if kind == "shm":
        from libs.transport.shm import ShmTransport

        return ShmTransport(me, idle_pool_bytes)
    from libs.transport.ucx.transport import UcxTransport

    return UcxTransport(me, idle_pool_bytes)
