"""One HTTP request's answer: its sequences run side by side, and their text goes out whole or as a stream.

The client's leaving cancels everything. Before the first output an error is an HTTP status, then one event.
"""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from starlette.types import Receive, Send

from services.gateway.api.errors import ApiError, Failed, encode_error
from services.gateway.api.serving import until_gone
from services.gateway.generation.dispatch import Dispatch
from services.gateway.generation.outcomes import error_of
from services.gateway.generation.response import Choice, PromptTokensDetails, Usage
from services.gateway.generation.sequence import Finished, Sequence
from services.gateway.generation.text import TextDelta
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()


class SlowClient(ApiError):
    """The client reads more slowly than its answer is made, and the buffer is full."""

    status, type, code = 408, "invalid_request_error", "client_too_slow"


class Outbox:
    """Bytes on their way to one client. Writers never wait: past the bound `overflowed` is set instead."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._came = asyncio.Event()
        self._is_closed = False
        self._error: ApiError | None = None
        self.overflowed = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Append; what comes after the overflow is dropped, because the answer ends with an error then."""
        if self._is_closed or self.overflowed.is_set():
            return
        if self._num_bytes + len(data) > self._max_bytes:
            self.overflowed.set()
            return
        self._parts.append(data)
        self._num_bytes += len(data)
        self._came.set()

    def close(self, error: ApiError | None = None) -> None:
        """Nothing more comes. Idempotent; the first error counts."""
        if not self._is_closed:
            self._is_closed, self._error = True, error
            self._came.set()

    async def take(self) -> bytes:
        """All that lies here, as soon as something does; empty once it is closed and read out.

        Raises the error that it was closed with, after all that came before.
        """
        await self._came.wait()
        data, self._parts, self._num_bytes = b"".join(self._parts), [], 0
        if not self._is_closed:
            self._came.clear()
        if not data and self._error is not None:
            raise self._error
        return data


@dataclass(frozen=True)
class StreamBounds:
    """Bounds of one answer on its way out."""

    max_buffered_bytes: int
    flush_timeout_seconds: float
    """How long the client may take to read what is left once all is made."""


class ResponseStream:
    """The answer to one request; `sequences` are all of its."""

    def __init__(
        self, sequences: list[Sequence], dispatch: Dispatch, metrics: GatewayMetrics, bounds: StreamBounds
    ) -> None:
        self._sequences, self._request = sequences, sequences[0].request
        self._dispatch, self._metrics, self._bounds = dispatch, metrics, bounds
        self._outbox = Outbox(bounds.max_buffered_bytes)
        self._started: set[int] = set()
        self._choices: dict[int, Choice] = {}

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError before anything was sent, ClientGone when the client left."""
        work = self._stream(send) if self._request.is_stream else self._whole(send)
        await until_gone(receive, work)

    def _on_text(self, sequence: Sequence, delta: TextDelta) -> None:
        choice = sequence.choice
        if not self._request.is_stream:
            self._choices.setdefault(choice, Choice(choice)).add(delta)
            return
        is_first = choice not in self._started
        self._started.add(choice)
        chunks = self._request.format.chunks(choice, delta, is_first=is_first)
        if chunks:
            self._outbox.put(b"".join(b"data: %b\n\n" % chunk for chunk in chunks))

    async def _whole(self, send: Send) -> None:
        await self._run_sequences()
        choices = [self._choices[sequence.choice] for sequence in self._sequences]
        body = self._request.format.whole(choices, self._usage())
        await self._begin(send, b"application/json", (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        with first_error():
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write(send))
                await self._produce()
                try:
                    async with asyncio.timeout(self._bounds.flush_timeout_seconds):
                        await writing
                except TimeoutError:
                    # Nothing more reaches a client that does not read; its connection is cut.
                    self._metrics.slow_clients.inc()

    async def _produce(self) -> None:
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(self._watch_overflow())
                    await self._run_sequences()
                    watching.cancel()
        except ApiError as error:
            self._outbox.close(error)
        except Exception:
            log.exception("answer_failed", sequences=[sequence.name for sequence in self._sequences])
            self._outbox.close(Failed("an unexpected error; it was logged"))
        else:
            if self._request.with_usage:
                self._outbox.put(b"data: %b\n\n" % self._request.format.usage_chunk(self._usage()))
            self._outbox.put(b"data: [DONE]\n\n")
            self._outbox.close(SlowClient("the last events found no room") if self._is_full() else None)

    def _is_full(self) -> bool:
        return self._outbox.overflowed.is_set()

    async def _watch_overflow(self) -> None:
        await self._outbox.overflowed.wait()
        self._metrics.slow_clients.inc()
        raise SlowClient(
            f"the client reads too slowly: {self._bounds.max_buffered_bytes} bytes are waiting for it"
        )

    async def _write(self, send: Send) -> None:
        data = await self._outbox.take()
        await self._begin(
            send,
            b"text/event-stream; charset=utf-8",
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        )
        try:
            while data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await self._outbox.take()
        except ApiError as error:
            event = b"data: %b\n\n" % encode_error(error)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _begin(self, send: Send, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        request_id = (b"x-request-id", self._request.answer_id.encode())
        start = [(b"content-type", content_type), *headers, request_id]
        await send({"type": "http.response.start", "status": 200, "headers": start})

    async def _run_sequences(self) -> None:
        """All sequences to their ends. The first that does not finish ends all, and is the error."""
        if len(self._sequences) == 1:
            await self._run_sequence(self._sequences[0])
            return
        with first_error():
            async with asyncio.TaskGroup() as group:
                for sequence in self._sequences:
                    group.create_task(self._run_sequence(sequence))

    async def _run_sequence(self, sequence: Sequence) -> None:
        self._metrics.prompt_tokens.inc(len(sequence.prompt))
        try:
            outcome = await self._dispatch.run(sequence, self._on_text)
        finally:
            self._note_end(sequence)
        if not isinstance(outcome, Finished):
            raise error_of(outcome)

    def _note_end(self, sequence: Sequence) -> None:
        outcome = sequence.outcome
        if outcome is None:
            return
        metrics = self._metrics
        counter = metrics.request_success if isinstance(outcome, Finished) else metrics.request_failure
        counter.labels(outcome.reason.value).inc()
        metrics.note_end(sequence.times, time.monotonic(), time.time())

    def _usage(self) -> Usage:
        firsts = range(0, len(self._sequences), self._request.num_choices)
        by_prompt = [self._sequences[first : first + self._request.num_choices] for first in firsts]
        num_prompt = sum(len(choices[0].prompt) for choices in by_prompt)
        num_new = sum(len(sequence.output) for sequence in self._sequences)
        # Choices of one prompt find each other's KV: what was there before is what the first of them found.
        num_cached = sum(min(choice.num_cached_tokens for choice in choices) for choices in by_prompt)
        return Usage(num_prompt, num_new, num_prompt + num_new, PromptTokensDetails(num_cached))


@contextmanager
def first_error() -> Generator[None]:
    """Raise the first error of a group of tasks as it is; the others are consequences of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _first_leaf(group) from None


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
