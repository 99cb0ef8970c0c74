"""Publishes token frames, and keeps them while the broker is away."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NoReturn

import structlog

from libs.bus.bus import Bus
from libs.bus.errors import BusError, MessageTooLarge
from libs.bus.messages.generation import TokenDelta, TokenFrame
from libs.worker.outbox import TokenOutbox

SendTokens = Callable[[str, Sequence[TokenDelta]], None]
"""Gateway, and what one step has for it."""

RETRY_SECONDS = 0.05
"""Between two attempts while the broker is away; its return is not announced."""

log = structlog.get_logger()


class TokenSender:
    """`send` takes a step's deltas at once; `run` publishes them in order."""

    def __init__(self, bus: Bus, worker: str, max_unsent_deltas: int) -> None:
        self._bus, self._worker = bus, worker
        self.outbox = TokenOutbox(max_unsent_deltas)
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._was_heard = True

    def send(self, gateway: str, deltas: Sequence[TokenDelta]) -> None:
        """What one step has for one gateway."""
        self.outbox.add(gateway, deltas)
        self._filled.set()
        self._emptied.clear()

    async def run(self) -> NoReturn:
        """Publish for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while (taken := self.outbox.take()) is not None:
                await self._publish(*taken)
            self._emptied.set()

    async def wait_sent(self) -> None:
        """Returns when nothing is kept."""
        await self._emptied.wait()

    async def _publish(self, gateway: str, deltas: list[TokenDelta]) -> None:
        """All of them in order, in several frames where one is too large; what cannot be sent is kept."""
        parts = deque([deltas])
        while parts:
            part = parts.popleft()
            try:
                await self._bus.publish(TokenFrame(worker=self._worker, deltas=part), to=gateway)
                self._note(is_heard=True)
            except MessageTooLarge as error:
                middle = len(part) // 2
                if middle:
                    parts.extendleft((part[middle:], part[:middle]))
                else:
                    # The gateway sees the gap and asks again.
                    log.warning(
                        "token_delta_too_large", size_bytes=error.size_bytes, limit_bytes=error.limit_bytes
                    )
            except ValueError as error:
                # No name that a message can be addressed to, so there is nobody to miss it.
                log.warning("gateway_name_invalid", gateway=gateway, error=str(error))
            except BusError as error:
                self._note(is_heard=False, error=str(error))
                self.outbox.put_back(gateway, list(chain(part, *parts)))
                await asyncio.sleep(RETRY_SECONDS)
                return

    def _note(self, *, is_heard: bool, error: str = "") -> None:
        if is_heard != self._was_heard:
            self._was_heard = is_heard
            if is_heard:
                log.info("tokens_sent_again")
            else:
                log.warning("tokens_kept", error=error)
