"""The way of a sequence over the bus: place, reserve, prefill, tokens; again elsewhere when something breaks.

What comes in by itself goes to `LiveSequences`.
"""

import asyncio
import time
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec
import structlog

from libs.bus.bus import Bus
from libs.bus.errors import BusError, MessageTooLarge, NoResponders, NotConnected, RequestTimedOut
from libs.bus.errors import Overloaded as BusOverloaded
from libs.bus.message import Message, Request
from libs.bus.messages.generation import Abort, Place, Placed, Prefill, Refused, Reserve, Unplace
from libs.request.outcome import FailureReason, RefusalReason
from services.gateway.api.errors import TooLarge
from services.gateway.generation.live import LiveSequences, OnText
from services.gateway.generation.readmission import (
    ROUTER,
    Again,
    History,
    Limits,
    RefusedBy,
    Trouble,
    Unreachable,
    next_step,
)
from services.gateway.generation.sequence import Attempt, Failed, Outcome, Sequence
from services.gateway.metrics import GatewayMetrics

Answer = TypeVar("Answer")

ABORTED = Failed(FailureReason.ABORTED, "nobody waits for it any more")

log = structlog.get_logger()


class Dispatch:
    """One `run` per sequence; leaving it frees everything everywhere."""

    def __init__(
        self,
        bus: Bus,
        gateway: str,
        live: LiveSequences,
        limits: Limits,
        metrics: GatewayMetrics,
        *,
        reply_timeout_seconds: float = 5.0,
    ) -> None:
        self._bus, self._gateway, self._live = bus, gateway, live
        self._limits, self._metrics = limits, metrics
        self._reply_timeout_seconds = reply_timeout_seconds

    async def run(self, sequence: Sequence, on_text: OnText) -> Outcome:
        """Bring a sequence to its outcome, its text going to `on_text`. Cancelling it aborts it everywhere.

        Raises TooLarge; all else is an outcome.
        """
        history = History()
        self._live.enter(sequence, on_text)
        try:
            async with asyncio.timeout(max(0.0, sequence.request.deadline_unix_seconds - time.time())):
                while sequence.outcome is None:
                    trouble = await self._attempt(sequence, history)
                    if trouble is not None:
                        await self._after(trouble, sequence, history)
        except TimeoutError:
            detail = f"not finished within its deadline, {len(sequence.output)} tokens were made"
            sequence.end(Failed(FailureReason.DEADLINE, detail))
        finally:
            sequence.end(ABORTED)
            self._live.leave(sequence)
        return sequence.outcome or ABORTED

    async def abort_strays(self) -> NoReturn:
        """For ever: abort sequences that nobody here waits for, in case an abort was lost."""
        while True:
            for request_id, worker in (await self._live.take_strays()).items():
                await self._publish(Abort(request_id=request_id), to=worker)

    async def _after(self, trouble: Trouble, sequence: Sequence, history: History) -> None:
        step = next_step(trouble, history, self._limits, time.monotonic())
        if not isinstance(step, Again):
            sequence.end(step)
            return
        cause = type(trouble).__name__.lower()
        self._metrics.readmissions.labels(cause).inc()
        log.info("sequence_readmitted", sequence=sequence.name, cause=cause, trouble=str(trouble))
        if step.wait_seconds:
            await asyncio.sleep(step.wait_seconds)

    async def _attempt(self, sequence: Sequence, history: History) -> Trouble | None:
        """One placement up to its end. None: the sequence has its outcome."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        attempt = sequence.begin_attempt(partial(_resolve, over))
        self._live.attach(attempt, sequence)
        try:
            trouble = await self._place(sequence, attempt, history, over)
            if trouble is None and sequence.outcome is None:
                await over
            return None if sequence.outcome else trouble or attempt.interruption
        finally:
            self._live.detach(attempt)
            attempt.is_over = True
            history.num_begun += attempt.is_begun
            await self._release(sequence, attempt)

    async def _place(
        self, sequence: Sequence, attempt: Attempt, history: History, over: "asyncio.Future[None]"
    ) -> Trouble | None:
        """Up to the prompt lying with its worker. None: wait for `over`, which may have come already."""
        place = Place(
            request_id=attempt.request_id,
            num_tokens=len(sequence.prompt) + len(sequence.output),
            max_new_tokens=sequence.sampling.max_tokens - len(sequence.output),
            deadline_unix_seconds=sequence.request.deadline_unix_seconds,
            exclude=history.exclude,
            model=sequence.request.model,
            names=sequence.block_hashes,
            session=sequence.request.conversation,
            traceparent=sequence.request.traceparent,
        )
        queue_seconds = max(0.1, sequence.request.deadline_unix_seconds - time.time() + 1.0)
        placed = await self._ask(place, over, who=ROUTER, timeout_seconds=queue_seconds)
        if not isinstance(placed, Placed):
            return placed
        attempt.prefill, attempt.decode = placed.prefill, placed.decode
        generation = sequence.generation(attempt, self._gateway)
        reserved = await self._ask(
            Reserve(generation=generation, prefill=placed.prefill), over, who=placed.decode
        )
        if reserved is None or isinstance(reserved, RefusedBy | Unreachable):
            return reserved
        attempt.is_begun, attempt.last_heard_seconds = True, time.monotonic()
        if not placed.prefill:
            return None
        prefill = Prefill(
            generation=generation,
            decode=placed.decode,
            link_address=reserved.link_address,
            first_block=reserved.num_cached_blocks,
        )
        queued = await self._ask(prefill, over, who=placed.prefill)
        return queued if isinstance(queued, RefusedBy | Unreachable) else None

    async def _ask(
        self,
        message: Request[Answer | Refused],
        over: "asyncio.Future[None]",
        *,
        who: str,
        timeout_seconds: float | None = None,
    ) -> Answer | RefusedBy | Unreachable | None:
        """The answer, or why there is none; None when the attempt was over first."""
        asking = asyncio.create_task(
            self._bus.request(message, to=who, timeout_seconds=timeout_seconds or self._reply_timeout_seconds)
        )
        ends: list[asyncio.Future[Any]] = [asking, over]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return None
            answer = asking.result()
        except MessageTooLarge as error:
            raise TooLarge(
                f"the request becomes a message of {error.size_bytes} bytes; the broker's max_payload is "
                f"{error.limit_bytes}"
            ) from error
        except NotConnected as error:
            return Unreachable(ROUTER, f"the message broker is away: {error}")
        except BusOverloaded as error:
            return RefusedBy(who, Refused(reason=RefusalReason.OVERLOADED, detail=str(error)))
        except (NoResponders, RequestTimedOut, BusError) as error:
            return Unreachable(
                who, f"no answer to {type(message).__name__} from {who or 'the router'}: {error}"
            )
        finally:
            await _settle(asking)
        return RefusedBy(who, answer) if isinstance(answer, Refused) else answer

    async def _release(self, sequence: Sequence, attempt: Attempt) -> None:
        """Tell everybody who may still hold something. What gets lost here is freed by leases."""
        if attempt.is_ended_by_worker and attempt.interruption is None:
            return
        if attempt.decode:  # also after a failure, which the prefill worker alone may know of
            await self._publish(Abort(request_id=attempt.request_id), to=attempt.decode)
        if attempt.prefill:
            await self._publish(Abort(request_id=attempt.request_id), to=attempt.prefill)
        await self._publish(Unplace(request_id=attempt.request_id))

    async def _publish(self, message: Message, to: str = "") -> None:
        try:
            await self._bus.publish(message, to=to)
        except BusError as error:
            log.info(
                "release_not_sent", message=msgspec.json.encode(message).decode(), to=to, error=str(error)
            )


def _resolve(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)


async def _settle(asking: "asyncio.Task[Any]") -> None:
    """Cancel what is still asked and wait for its end; its result no longer matters."""
    if not asking.done():
        asking.cancel()
        await asyncio.wait({asking})
    if not asking.cancelled():
        asking.exception()
