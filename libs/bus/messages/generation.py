"""The conversation that turns a request into tokens: gateway -> router -> decode and prefill worker ->
gateway."""

from typing import ClassVar

import msgspec

from libs.bus.message import Message, Request
from libs.request.generation import Generation
from libs.request.outcome import FailureReason, FinishReason, RefusalReason
from libs.request.sampling import TokenLogprobs


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Nothing was begun. `retry_after_seconds` is the answerer's guess."""

    reason: RefusalReason
    detail: str = ""
    retry_after_seconds: float = 1.0


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed"):
    """Incarnations of the two instances. `prefill` is empty where the decode instance runs the prompt
    itself."""

    prefill: str
    decode: str


class Place(Request[Placed | Refused], frozen=True, kw_only=True, tag="place"):
    """Choose a prefill and a decode instance. The router queues this while nobody has room, until the
    deadline."""

    subject: ClassVar[str] = "kvmesh.router.place"
    answer: ClassVar[object] = Placed | Refused
    request_id: str
    num_tokens: int
    max_new_tokens: int
    deadline_unix_seconds: float
    exclude: tuple[str, ...] = ()
    """Incarnations that just failed this request."""
    model: str = ""
    """Only instances whose presence says this model; empty: any."""
    names: bytes = b""
    """Names of the prompt's full blocks, 16 bytes each; empty where the gateway cannot tell them."""
    session: str = ""
    """What the client calls the conversation, for stickiness; empty: nothing."""
    traceparent: str = ""


class Unplace(Message, frozen=True, kw_only=True, tag="unplace"):
    """The gateway no longer wants this placement (client gone while queued, or the reservation was
    refused)."""

    subject: ClassVar[str] = "kvmesh.router.unplace"
    request_id: str


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """Blocks for the prompt are held under a lease; KV is awaited at `link_address`."""

    link_address: str
    num_cached_blocks: int = 0
    """Blocks of the prompt whose KV is here already; it need not be sent."""


class Reserve(Request[Reserved | Refused], frozen=True, kw_only=True, tag="reserve"):
    """Hold blocks for this sequence; adopt its KV from `prefill`, or run the prompt here where that is
    empty."""

    subject: ClassVar[str] = "kvmesh.decode.{to}.reserve"
    answer: ClassVar[object] = Reserved | Refused
    generation: Generation
    prefill: str


class Queued(msgspec.Struct, frozen=True, kw_only=True, tag="queued"):
    """The prompt is in the prefill worker's bounded queue."""

    num_waiting: int = 0


class Prefill(Request[Queued | Refused], frozen=True, kw_only=True, tag="prefill"):
    """Run this prompt and hand its KV to the decode instance `decode` at `link_address`, layer by layer."""

    subject: ClassVar[str] = "kvmesh.prefill.{to}.prefill"
    answer: ClassVar[object] = Queued | Refused
    generation: Generation
    decode: str
    link_address: str
    first_block: int = 0
    """The decode instance has the KV of the blocks before this one."""


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Nobody wants this sequence any more; free what it holds. Unknown ids are ignored. Addressed to a
    worker."""

    subject: ClassVar[str] = "kvmesh.worker.{to}.abort"
    request_id: str


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step gave one sequence. `index` is the output index of the first token, counted over all
    attempts; a gap tells the gateway that a frame was lost. With `finish` or `failure` it is the sequence's
    last delta."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    failure: FailureReason | None = None
    detail: str = ""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found, not computed; told with the first token."""
    prefill_started_unix_seconds: float = 0.0
    """When the prompt left the prefill queue; told with the first token."""


class TokenFrame(Message, frozen=True, kw_only=True, tag="tokens"):
    """All that one decode step has for one gateway."""

    subject: ClassVar[str] = "kvmesh.gateway.{to}.tokens"
    worker: str
    deltas: list[TokenDelta]
