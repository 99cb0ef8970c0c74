"""One HTTP request's answer: its sequences run side by side, and their text goes out whole or as a stream.

The client's leaving cancels everything. Before the first output an error is an HTTP status, then one event.
"""

import asyncio
import time
from dataclasses import dataclass

import structlog
from starlette.types import Receive, Send

from libs.request.outcome import FinishReason
from services.gateway.api.errors import ApiError, Failed, TooLarge, encode_error
from services.gateway.api.together import first_error, until_gone
from services.gateway.generation.answer import Choice, PromptTokensDetails, Usage, Wording
from services.gateway.generation.dispatch import Dispatch, TooLargeForBroker
from services.gateway.generation.outbox import Outbox, SlowClient
from services.gateway.generation.outcomes import error_of
from services.gateway.generation.sequence_text import Piece
from services.gateway.generation.session import Finished, Session
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()


@dataclass(frozen=True)
class AnsweringRules:
    """Bounds of one answer on its way out."""

    max_buffered_bytes: int
    flush_timeout_seconds: float
    """How long the client may take to read what is left once all is made."""


class Answering:
    """The answer to one request. Give it its sessions (whose `deliver` is this one's), then `run` it."""

    def __init__(
        self,
        wording: Wording,
        dispatch: Dispatch,
        metrics: GatewayMetrics,
        rules: AnsweringRules,
        *,
        answer_id: str,
        num_choices: int,
        is_stream: bool,
        with_usage: bool,
    ) -> None:
        self._wording, self._dispatch, self._metrics, self._rules = wording, dispatch, metrics, rules
        self._headers = [(b"x-request-id", answer_id.encode())]
        self._num_choices = num_choices
        self._is_stream, self._with_usage = is_stream, with_usage
        self._outbox = Outbox(rules.max_buffered_bytes)
        self._started: set[int] = set()
        self._choices: dict[int, Choice] = {}
        self.sessions: list[Session] = []

    def deliver(self, session: Session, piece: Piece, finish: FinishReason | None) -> None:
        """What a frame brought for one session; called on the loop, never waits."""
        choice = session.choice
        if not self._is_stream:
            self._choices.setdefault(choice, Choice(choice)).add(piece, finish)
            return
        is_first = choice not in self._started
        self._started.add(choice)
        chunks = self._wording.chunks(choice, piece, finish, is_first=is_first)
        if chunks:
            self._outbox.put(b"".join(b"data: %b\n\n" % chunk for chunk in chunks))

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError before anything was sent, ClientGone when the client left."""
        await until_gone(receive, self._stream(send) if self._is_stream else self._whole(send))

    async def _whole(self, send: Send) -> None:
        await self._run_sessions()
        choices = [self._choices[session.choice] for session in self.sessions]
        body = self._wording.whole(choices, self._usage())
        await self._begin(send, b"application/json", (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        with first_error():
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write(send))
                await self._produce()
                try:
                    async with asyncio.timeout(self._rules.flush_timeout_seconds):
                        await writing
                except TimeoutError:
                    # Nothing more can be told to a client that does not read; its connection is cut.
                    self._metrics.slow_clients.inc()

    async def _produce(self) -> None:
        try:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(self._watch_overflow())
                    await self._run_sessions()
                    watching.cancel()
        except ApiError as error:
            self._outbox.close(error)
        except Exception:
            log.exception("answer_failed", sessions=[session.name for session in self.sessions])
            self._outbox.close(Failed("an unexpected error; it was logged"))
        else:
            if self._with_usage:
                self._outbox.put(b"data: %b\n\n" % self._wording.usage_chunk(self._usage()))
            self._outbox.put(b"data: [DONE]\n\n")
            self._outbox.close(SlowClient("the last events found no room") if self._is_full() else None)

    def _is_full(self) -> bool:
        return self._outbox.overflowed.is_set()

    async def _watch_overflow(self) -> None:
        await self._outbox.overflowed.wait()
        self._metrics.slow_clients.inc()
        raise SlowClient(
            f"the client reads too slowly: {self._rules.max_buffered_bytes} bytes are waiting for it"
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
        told = [(b"content-type", content_type), *headers, *self._headers]
        await send({"type": "http.response.start", "status": 200, "headers": told})

    async def _run_sessions(self) -> None:
        """All sequences to their ends. The first that does not finish ends all, and is the error."""
        if len(self.sessions) == 1:
            await self._run_session(self.sessions[0])
            return
        with first_error():
            async with asyncio.TaskGroup() as group:
                for session in self.sessions:
                    group.create_task(self._run_session(session))

    async def _run_session(self, session: Session) -> None:
        self._metrics.prompt_tokens.inc(len(session.prompt))
        try:
            outcome = await self._dispatch.run(session)
        except TooLargeForBroker as error:
            raise TooLarge(str(error)) from error
        finally:
            self._metrics.note_end(session, time.monotonic(), time.time())
        if not isinstance(outcome, Finished):
            raise error_of(outcome)

    def _usage(self) -> Usage:
        firsts = range(0, len(self.sessions), self._num_choices)
        by_prompt = [self.sessions[first : first + self._num_choices] for first in firsts]
        num_prompt = sum(len(choices[0].prompt) for choices in by_prompt)
        num_new = sum(len(session.output) for session in self.sessions)
        # Choices of one prompt find each other's KV: what was there before is what the first of them found.
        num_cached = sum(min(choice.num_cached_tokens for choice in choices) for choices in by_prompt)
        return Usage(num_prompt, num_new, num_prompt + num_new, PromptTokensDetails(num_cached))
