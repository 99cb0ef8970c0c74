"""One sequence from its admission to its one terminal outcome, over all attempts. Pure: time is passed in.

A session has at most one live attempt. An attempt is over when the sequence ended or when something
interrupted it; `Attempt.on_over` tells. What an attempt that is over still sends matches nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from libs.bus.messages.generation import Refused, TokenDelta
from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FailureReason, FinishReason
from libs.request.sampling import SamplingParams
from services.gateway.generation.sequence_text import Piece, SequenceText


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


@dataclass(slots=True)
class Attempt:
    """One placement of one session and who was told about it."""

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
    told_ended_seconds: float | None = None
    """When a load report first said, since then, that it has ended."""

    def depends_on(self, incarnation: str) -> bool:
        """Whether it cannot go on without this worker; prefill is needed until the first token."""
        return incarnation == self.decode or (incarnation == self.prefill and not self.has_tokens)


@dataclass(slots=True)
class Times:
    """Monotonic seconds of what a session went through; the prefill's start is by the worker's clock."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    prefill_started_unix: float = 0.0


Deliver = Callable[["Session", Piece, FinishReason | None], None]


@dataclass(slots=True)
class Session:
    """One sequence. `deliver` gets what each delta adds to the answer, in order, and the end."""

    name: str
    choice: int
    prompt: list[int]
    sampling: SamplingParams
    text: SequenceText
    deliver: Deliver
    deadline_unix_seconds: float
    times: Times
    model: str = ""
    cache_salt: str = ""
    tenant: str = ""
    names: bytes = b""
    """Of the prompt's full blocks, as the workers form them; empty where that is not known."""
    conversation: str = ""
    """What stickiness goes by; empty: nothing."""
    traceparent: str = ""
    output: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_attempts: int = 0
    attempt: Attempt | None = None
    outcome: Outcome | None = None

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
            deadline_unix_seconds=self.deadline_unix_seconds,
            cache_salt=self.cache_salt,
            traceparent=self.traceparent,
            tenant=self.tenant,
        )

    def accept(self, delta: TokenDelta, now: float, sender: str = "") -> int:
        """Take a delta of the live attempt; return how many new tokens it brought. A gap interrupts.

        `sender` is the worker whose frame it came in, where that is known.
        """
        attempt = self.attempt
        if attempt is None or attempt.is_over:
            return 0
        attempt.last_heard_seconds, attempt.num_idle_reports, attempt.told_ended_seconds = now, 0, None
        attempt.is_begun = True
        attempt.is_ended_by_worker = delta.finish is not None or delta.failure is not None
        if delta.failure is not None:
            suspect = "" if attempt.has_tokens else attempt.prefill
            if sender and sender == attempt.prefill and delta.failure is FailureReason.PEER_LOST:
                # A prefill worker speaks for itself only where no Link leads to the decode worker.
                suspect = attempt.decode
            self.interrupt(Interruption(delta.failure, delta.detail, suspect=suspect))
            return 0
        expected = len(self.output)
        if delta.index > expected:
            detail = f"tokens {expected} to {delta.index - 1} of {attempt.request_id} never arrived"
            self.interrupt(Interruption(FailureReason.PEER_LOST, detail))
            return 0
        num_new = self._take_tokens(attempt, delta, skip=expected - delta.index)
        if num_new:
            self._note_tokens(attempt, delta, now)
        self._deliver(self._finish_of(delta))
        return num_new

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

    def _take_tokens(self, attempt: Attempt, delta: TokenDelta, skip: int) -> int:
        num_new = 0
        for position in range(skip, len(delta.token_ids)):
            is_last = position == len(delta.token_ids) - 1
            token_id = delta.token_ids[position]
            logprobs = delta.logprobs[position] if position < len(delta.logprobs) else None
            self.output.append(token_id)
            # The token that ended the sequence (end of text, a stop id) is counted and not shown.
            self.text.push(token_id, logprobs, hidden=is_last and delta.finish is FinishReason.STOP)
            num_new += 1
            if self.text.stopped:
                break
        return num_new

    def _note_tokens(self, attempt: Attempt, delta: TokenDelta, now: float) -> None:
        attempt.has_tokens = True
        if self.times.first_token is None:
            self.times.first_token = now
            self.times.prefill_started_unix = delta.prefill_started_unix_seconds
            self.num_cached_tokens = min(delta.num_cached_tokens, len(self.prompt))
        self.times.last_token = now

    def _finish_of(self, delta: TokenDelta) -> FinishReason | None:
        if self.text.stopped:
            return FinishReason.STOP
        if delta.finish is not None:
            return delta.finish
        return FinishReason.LENGTH if len(self.output) >= self.sampling.max_tokens else None

    def _deliver(self, finish: FinishReason | None) -> None:
        if finish is not None:
            self.text.finish()
            finish = FinishReason.STOP if self.text.stopped else finish
        piece = self.text.take()
        if finish is not None:
            self.end(Finished(finish))
        if piece or finish is not None:
            self.deliver(self, piece, finish)

    def _end_attempt(self) -> None:
        if self.attempt is not None and not self.attempt.is_over:
            self.attempt.is_over = True
            self.attempt.on_over()
