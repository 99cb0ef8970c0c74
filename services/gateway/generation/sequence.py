"""One sequence from its admission to its one terminal outcome, over all attempts. Pure: time is passed in.

A sequence has at most one live attempt. An attempt is over when the sequence ended or when something
interrupted it; `Attempt.on_over` tells. What an attempt that is over still sends matches nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from libs.bus.messages.generation import Refused, TokenDelta
from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FailureReason, FinishReason
from libs.request.sampling import SamplingParams
from services.gateway.generation.response import ResponseFormat
from services.gateway.generation.text import SequenceText, TextDelta
from services.gateway.metrics import Times


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence came to its own end."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence was begun and could not be ended, or nobody wanted it any more."""

    reason: FailureReason
    detail: str = ""


Outcome = Finished | Refused | Failed


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why an attempt ended before its sequence did: `lost` is gone, `suspect` may be at fault."""

    reason: FailureReason
    detail: str
    lost: str = ""
    suspect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One HTTP request, read and checked: what all its sequences share, and how it is answered."""

    answer_id: str
    arrived_seconds: float
    """By the monotonic clock."""
    deadline_unix_seconds: float
    format: ResponseFormat
    num_choices: int = 1
    """Sequences of each prompt."""
    is_stream: bool = False
    with_usage: bool = False
    model: str = ""
    """What the router chooses instances by; empty: any."""
    tenant: str = ""
    cache_salt: str = ""
    conversation: str = ""
    """What stickiness goes by; empty: nothing."""
    traceparent: str = ""


@dataclass(slots=True)
class Attempt:
    """One placement of one sequence and the workers that know of it."""

    request_id: str
    on_over: Callable[[], None]
    prefill: str = ""
    decode: str = ""
    is_begun: bool = False
    """A decode worker said that it holds the sequence."""
    has_tokens: bool = False
    is_over: bool = False
    is_ended_by_worker: bool = False
    """Its decode worker sent the last delta: nothing is held there any more."""
    interruption: Interruption | None = None
    last_heard_seconds: float = 0.0
    num_idle_reports: int = 0
    """Load reports since then that said that its worker has nothing to do."""
    reported_ended_seconds: float | None = None
    """When a load report first said, since then, that it has ended."""

    def depends_on(self, incarnation: str) -> bool:
        """Whether it cannot go on without this worker; prefill is needed until the first token."""
        return incarnation == self.decode or (incarnation == self.prefill and not self.has_tokens)


@dataclass(slots=True)
class Sequence:
    """One choice of one prompt of a request."""

    request: GenerationRequest
    choice: int
    prompt: list[int]
    sampling: SamplingParams
    text: SequenceText
    times: Times
    block_hashes: bytes = b""
    """Of the prompt's full blocks, as the workers form them; empty where that is not known."""
    output: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_attempts: int = 0
    attempt: Attempt | None = None
    outcome: Outcome | None = None

    @property
    def name(self) -> str:
        """The answer's id and the number of the choice."""
        return f"{self.request.answer_id}-{self.choice}"

    def begin_attempt(self, on_over: Callable[[], None]) -> Attempt:
        """A new attempt under a new id; the one before must be over."""
        self.num_attempts += 1
        self.attempt = Attempt(request_id=f"{self.name}.{self.num_attempts}", on_over=on_over)
        return self.attempt

    def generation(self, attempt: Attempt, gateway: str) -> Generation:
        """What the workers get: the prompt and all tokens so far."""
        return Generation(
            request_id=attempt.request_id,
            token_ids=pack_token_ids(self.prompt + self.output),
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            gateway=gateway,
            deadline_unix_seconds=self.request.deadline_unix_seconds,
            cache_salt=self.request.cache_salt,
            traceparent=self.request.traceparent,
            tenant=self.request.tenant,
        )

    def accept(self, delta: TokenDelta, now: float, sender: str = "") -> TextDelta | None:
        """Take a delta of the live attempt; return what it adds to the answer, if anything. A gap interrupts.

        `sender` is the worker whose frame it came in, where that is known.
        """
        attempt = self.attempt
        if attempt is None or attempt.is_over:
            return None
        attempt.last_heard_seconds, attempt.num_idle_reports, attempt.reported_ended_seconds = now, 0, None
        attempt.is_begun = True
        attempt.is_ended_by_worker = delta.finish is not None or delta.failure is not None
        if delta.failure is not None:
            self.interrupt(
                Interruption(delta.failure, delta.detail, suspect=_suspect(attempt, delta, sender))
            )
            return None
        expected = len(self.output)
        if delta.index > expected:
            detail = f"tokens {expected} to {delta.index - 1} of {attempt.request_id} never arrived"
            self.interrupt(Interruption(FailureReason.PEER_LOST, detail))
            return None
        self._take_tokens(delta, skip=expected - delta.index)
        if len(self.output) > expected:
            self._note_tokens(attempt, delta, now)
        return self._text_delta(delta)

    def interrupt(self, interruption: Interruption) -> None:
        """The live attempt cannot go on; the sequence may, elsewhere."""
        if self.attempt is not None and not self.attempt.is_over:
            self.attempt.interruption = interruption
            self._end_attempt()

    def end(self, outcome: Outcome) -> bool:
        """The terminal outcome; only the first one counts, and only for that one the answer is true."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self._end_attempt()
        return True

    def _take_tokens(self, delta: TokenDelta, skip: int) -> None:
        for position in range(skip, len(delta.token_ids)):
            is_last = position == len(delta.token_ids) - 1
            token_id = delta.token_ids[position]
            logprobs = delta.logprobs[position] if position < len(delta.logprobs) else None
            self.output.append(token_id)
            # The token that ended the sequence (end of text, a stop id) is counted and not shown.
            self.text.push(token_id, logprobs, hidden=is_last and delta.finish is FinishReason.STOP)
            if self.text.stopped:
                break

    def _note_tokens(self, attempt: Attempt, delta: TokenDelta, now: float) -> None:
        attempt.has_tokens = True
        if self.times.first_token is None:
            self.times.first_token = now
            self.times.prefill_started_unix = delta.prefill_started_unix_seconds
            self.num_cached_tokens = min(delta.num_cached_tokens, len(self.prompt))
        self.times.last_token = now

    def _text_delta(self, delta: TokenDelta) -> TextDelta | None:
        finish = FinishReason.STOP if self.text.stopped else delta.finish
        if finish is None and len(self.output) >= self.sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.text.finish()
            finish = FinishReason.STOP if self.text.stopped else finish
            self.end(Finished(finish))
        added = self.text.take()
        added.finish = finish
        return added if added.text or added.tokens or finish is not None else None

    def _end_attempt(self) -> None:
        if self.attempt is not None and not self.attempt.is_over:
            self.attempt.is_over = True
            self.attempt.on_over()


def _suspect(attempt: Attempt, delta: TokenDelta, sender: str) -> str:
    """The worker that may be at fault for a failure; empty where none can be named."""
    if sender and sender == attempt.prefill and delta.failure is FailureReason.PEER_LOST:
        # A prefill worker speaks for itself only where no Link leads to the decode worker.
        return attempt.decode
    return "" if attempt.has_tokens else attempt.prefill
