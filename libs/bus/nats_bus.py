"""The bus over a NATS broker."""

from libs.bus.broker_address import read_address
from libs.bus.bus import LEASE_SECONDS, PRESENCE_TTL_SECONDS, Bus
from libs.bus.nats_bucket import NatsBucket
from libs.bus.nats_connection import NatsConnection

PRESENCE_BUCKET = "kvmesh_presence"
LEASES_BUCKET = "kvmesh_leases"


class NatsBus(Bus):
    """Made by `connect`. Survives broker restarts: subscriptions, serving, presence and watches go on."""

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str = "",
        presence_ttl_seconds: float = PRESENCE_TTL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> "NatsBus":
        """Connect to `nats://host:port`; `name` is what the broker's monitoring shows.

        Raises NotConnected at once when no broker answers there, ValueError when `url` is malformed.
        """
        connection = NatsConnection(read_address(url), name)
        await connection.open()
        return cls(
            connection,
            NatsBucket(connection, PRESENCE_BUCKET, "who is there in the mesh", presence_ttl_seconds),
            NatsBucket(connection, LEASES_BUCKET, "who leads in the mesh", lease_seconds),
        )
