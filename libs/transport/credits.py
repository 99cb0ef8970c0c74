"""How much may be under way on a Link: pure arithmetic, kept at both ends.

The receiver's limits bound the frames and the body bytes that it holds or that travel to it. The sender
counts what it sent, the receiver what was released; the receiver tells its two running sums, never
differences, so a credit may be told twice or late without harm.
"""

from typing import NamedTuple

import msgspec


class LinkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one side accepts on a Link; told to the peer in the handshake."""

    window_frames: int = 64
    window_bytes: int = 64 << 20
    max_body_bytes: int = 1 << 30
    """A body larger than the window travels alone."""


class Credit(NamedTuple):
    """Running sums of what the receiver released since the Link was made."""

    num_frames: int
    num_bytes: int


def untold_bytes(limits: LinkLimits) -> int:
    """Released bytes that the receiver may keep to itself for a while; the sender counts that much as
    nothing."""
    return limits.window_bytes // 8


class SendWindow:
    """The sender's count. `limits` are the receiver's."""

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._sent_frames = self._sent_bytes = 0
        self._released_frames = self._released_bytes = 0

    def can_send(self, num_bytes: int) -> bool:
        """Whether a frame with a body of this size fits now. Always true once everything was released."""
        return _has_room(
            self._limits,
            self._sent_frames - self._released_frames,
            self._sent_bytes - self._released_bytes,
            num_bytes,
        )

    def send(self, num_bytes: int) -> None:
        """Count one frame as sent."""
        self._sent_frames += 1
        self._sent_bytes += num_bytes

    def credit(self, released: Credit) -> bool:
        """Take the receiver's sums. False when they exceed what was sent: the peer breaks the protocol."""
        num_frames, num_bytes = released
        if num_frames > self._sent_frames or num_bytes > self._sent_bytes:
            return False
        self._released_frames = max(self._released_frames, num_frames)
        self._released_bytes = max(self._released_bytes, num_bytes)
        return True


class ReceiveWindow:
    """The receiver's count, by its own limits."""

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._arrived_frames = self._arrived_bytes = 0
        self._released_frames = self._released_bytes = 0
        self._told = Credit(0, 0)

    @property
    def held(self) -> Credit:
        """Arrived and not released."""
        return Credit(
            self._arrived_frames - self._released_frames, self._arrived_bytes - self._released_bytes
        )

    def can_arrive(self, num_bytes: int) -> bool:
        """Whether an honest sender could send this now."""
        return num_bytes <= self._limits.max_body_bytes and _has_room(
            self._limits,
            self._arrived_frames - self._released_frames,
            self._arrived_bytes - self._released_bytes,
            num_bytes,
        )

    def arrive(self, num_bytes: int) -> None:
        """Count one frame as arrived."""
        self._arrived_frames += 1
        self._arrived_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count one frame as released."""
        self._released_frames += 1
        self._released_bytes += num_bytes

    def is_credit_due(self) -> bool:
        """Whether the sender must be told now, lest it stand still; else the next frame back carries it."""
        untold_frames = self._released_frames - self._told.num_frames
        untold = self._released_bytes - self._told.num_bytes
        return 2 * untold_frames >= self._limits.window_frames or untold > untold_bytes(self._limits)

    def tell(self) -> Credit:
        """The sums to send; counted as told."""
        self._told = Credit(self._released_frames, self._released_bytes)
        return self._told


def _has_room(limits: LinkLimits, num_frames: int, outstanding_bytes: int, num_bytes: int) -> bool:
    if num_frames >= limits.window_frames:
        return False
    fits = outstanding_bytes + num_bytes <= limits.window_bytes
    return fits or outstanding_bytes <= untold_bytes(limits)
