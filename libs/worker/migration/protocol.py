"""Messages between an owner and a host over their Links; `framing` sends the arrays of each behind it."""

from enum import Enum

import msgspec
import torch

from libs.engine.hosting.calls import HostedCall
from libs.placement.module import Module


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Make room for a module. owner -> host, answered by Opened or OpenRefused."""

    ask_id: int
    move_id: str
    module: Module
    fingerprint: str
    """Of the owner's model and block layout; a host with another one refuses."""
    num_blocks_wanted: int
    num_blocks_least: int
    has_weights: bool = False
    """The layers' tensors follow in WeightPieces; otherwise the host's own are used."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The module is there, empty. host -> owner."""

    ask_id: int
    num_blocks: int


class RefusalKind(Enum):
    """Which error of the engine a refusal is."""

    NO_ROOM = "no_room"
    REFUSED = "refused"


class OpenRefused(msgspec.Struct, frozen=True, kw_only=True, tag="open_refused"):
    """Nothing was made. host -> owner."""

    ask_id: int
    kind: RefusalKind
    detail: str


class WeightPiece(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="weights"):
    """Bytes from `first_byte` on of one tensor of an open module. owner -> host, answered by WeightsAt or
    OpenRefused. Names and shapes are those of `libs.model.layer_weights`."""

    ask_id: int
    move_id: str
    layer: int
    name: str
    first_byte: int
    piece: torch.Tensor


class WeightsAt(msgspec.Struct, frozen=True, kw_only=True, tag="weights_at"):
    """That piece is there; after the last one of a layer: the layer can run. host -> owner."""

    ask_id: int


class Close(msgspec.Struct, frozen=True, kw_only=True, tag="close"):
    """Free the module, also a half-opened one; ignored if unknown. owner -> host, answered by Closed."""

    ask_id: int
    move_id: str


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    """It is free. host -> owner."""

    ask_id: int


class Call(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="call"):
    """One call, done in order. owner -> host, answered by Result or CallFailed where `call_id` is not 0."""

    call_id: int
    call: HostedCall


class Result(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="result"):
    """What a call gave. host -> owner."""

    call_id: int
    tensor: torch.Tensor


class CallFailed(msgspec.Struct, frozen=True, kw_only=True, tag="call_failed"):
    """The host could not do this call, or one before it: what lies there is of no use. host -> owner."""

    call_id: int
    detail: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Renews the lease of all modules. owner -> host, answered by Pong where `ask_id` is not 0."""

    ask_id: int = 0


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """So am I. host -> owner."""

    ask_id: int


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """This host is about to end: take your modules back. host -> owner."""


Head = (
    Open
    | Opened
    | OpenRefused
    | WeightPiece
    | WeightsAt
    | Close
    | Closed
    | Call
    | Result
    | CallFailed
    | Ping
    | Pong
    | Leaving
)
