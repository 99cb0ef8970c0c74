"""Which transport: by setting, one per process."""

from typing import Literal

from libs.transport.auto import AutoTransport
from libs.transport.credits import LinkLimits
from libs.transport.handshake import Identity
from libs.transport.port import Transport
from libs.transport.shm import ShmTransport
from libs.transport.ucx.transport import UcxTransport

TransportKind = Literal["auto", "ucx", "shm"]
"""auto: shared memory between processes of one host, UCX between hosts."""


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

    def me(kind: str) -> Identity:
        return Identity(kind=kind, incarnation=incarnation, secret=secret, limits=limits or LinkLimits())

    shm, ucx = ShmTransport(me("shm"), idle_pool_bytes), UcxTransport(me("ucx"), idle_pool_bytes)
    if kind == "auto":
        return AutoTransport(shm, ucx)
    return shm if kind == "shm" else ucx
