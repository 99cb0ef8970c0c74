"""Leases in a JetStream key-value bucket: whoever stores next after the sequence it saw has one.

The broker's clock ends them, by the age of the entry; nobody's own clock takes part.
"""

from libs.bus.nats_bucket import NatsBucket, Stored
from libs.bus.nats_connection import NatsConnection

BUCKET = "kvmesh_leases"


class NatsLeases:
    """A `LeaseStore`."""

    def __init__(self, connection: NatsConnection, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._bucket = NatsBucket(connection, BUCKET, "who leads in the mesh", lease_seconds)

    async def hold(self, name: str, holder: str) -> bool:
        """As `Bus.hold_lease`."""
        seen = await self._bucket.get(name)
        if not _is_open_to(holder, seen):
            return False
        return await self._bucket.replace(name, holder.encode(), seen.sequence) is not None

    async def release(self, name: str, holder: str) -> None:
        """As `Bus.release_lease`."""
        seen = await self._bucket.get(name)
        if seen.value == holder.encode():
            await self._bucket.replace(name, b"", seen.sequence, is_delete=True)

    async def holder(self, name: str) -> str | None:
        """As `Bus.lease_holder`."""
        seen = await self._bucket.get(name)
        return None if seen.value is None else seen.value.decode()


def _is_open_to(holder: str, seen: Stored) -> bool:
    return seen.value is None or seen.value == holder.encode()
