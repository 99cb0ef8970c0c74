"""The Links of a transport that stand: what its gauge shows."""

import asyncio

from libs.transport.link import PeerLink


class OpenLinks:
    """The Links of one transport that are neither lost nor closed."""

    def __init__(self) -> None:
        self._links: set[PeerLink] = set()

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: PeerLink) -> None:
        """Count one that stands."""
        self._links.add(link)

    def discard(self, link: PeerLink) -> None:
        """One is over."""
        self._links.discard(link)

    def snapshot(self) -> tuple[PeerLink, ...]:
        """All that stand now."""
        return tuple(self._links)

    async def close(self) -> None:
        """Close all at once."""
        async with asyncio.TaskGroup() as group:
            for link in self.snapshot():
                group.create_task(link.close())
