"""The bus over a NATS broker."""

from libs.bus.broker_address import read_address
from libs.bus.nats_connection import NatsConnection
from libs.bus.nats_leases import NatsLeases
from libs.bus.nats_presence import NatsPresence
from libs.bus.port import LEASE_SECONDS
from libs.bus.typed_bus import TypedBus

PRESENCE_TTL_SECONDS = 3.0


class NatsBus(TypedBus):
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
            connection, NatsPresence(connection, presence_ttl_seconds), NatsLeases(connection, lease_seconds)
        )
