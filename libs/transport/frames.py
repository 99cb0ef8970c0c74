"""Headers of the frames that workers and the store exchange over Links. Bodies are blocks, layer by layer.

A layer's blocks travel as [num_blocks, num_kv_heads, 2, block_size, head_dim] (the pool's own layout),
contiguous. Where they are small, `num_layers` layers share a frame, one after another.

Between workers `checksum` is xxh3-64 of the body. To and from the store it is xxh3-64 over the little-endian
xxh3-64 of each block, so that what the store kept beside a block at its put still proves the block when it is
fetched with others. Either is verified where the blocks are adopted.
"""

import msgspec

from libs.request.outcome import FailureReason, FinishReason
from libs.request.sampling import TokenLogprobs


class LayerBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="kv"):
    """KV of blocks `first_block`.. of one sequence in layers `layer`.., prefill -> decode."""

    request_id: str
    layer: int
    num_layers: int = 1
    first_block: int
    num_blocks: int
    checksum: int


class HandOver(msgspec.Struct, frozen=True, kw_only=True, tag="handover"):
    """All layers are sent; here is the first token. No body. prefill -> decode."""

    request_id: str
    token_id: int
    finish: FinishReason | None = None
    """Set when the first token is also the last."""
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    prefill_started_unix_seconds: float = 0.0


class HandOverFailed(msgspec.Struct, frozen=True, kw_only=True, tag="handover_failed"):
    """The prompt could not be run. No body. prefill -> decode."""

    request_id: str
    reason: FailureReason
    detail: str = ""


class StillQueued(msgspec.Struct, frozen=True, kw_only=True, tag="still_queued"):
    """These prompts wait or run here; keep their blocks. Renews leases. No body. prefill -> decode."""

    request_ids: tuple[str, ...]


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Send me these blocks (body: 16-byte names), layer by layer. worker -> store."""

    fetch_id: int
    num_blocks: int


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """Layers `layer`.. of the blocks of a Fetch; a later miss ends it with FetchMissed. store -> worker."""

    fetch_id: int
    layer: int
    num_layers: int = 1
    num_blocks: int
    checksum: int


class FetchMissed(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_missed"):
    """The blocks are not there (any more). store -> worker."""

    fetch_id: int


class PutNames(msgspec.Struct, frozen=True, kw_only=True, tag="put_names"):
    """Blocks about to be put (body: 16-byte names, each the child of the one before); their layers follow as
    PutLayer. worker -> store."""

    put_id: int
    num_blocks: int
    num_layers: int
    layer_bytes: int
    """Bytes of one block in one layer."""
    parent: bytes = b""
    """Name of the block before the first; empty where the chain starts here."""
    request_id: str = ""
    num_output_tokens: int = 0
    """Of the finished sequence that these blocks end; 0 while it is a prompt. Both for the access trace."""


class PutLayer(msgspec.Struct, frozen=True, kw_only=True, tag="put_layer"):
    """Layers `layer`.. of the blocks of a PutNames. worker -> store."""

    put_id: int
    layer: int
    num_layers: int = 1
    checksum: int


FrameHeader = (
    LayerBlocks
    | HandOver
    | HandOverFailed
    | StillQueued
    | Fetch
    | Fetched
    | FetchMissed
    | PutNames
    | PutLayer
)


class HeaderUndecodable(Exception):
    """The peer sent a frame that is none of these: versions differ. The Link is of no use."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FrameHeader] = msgspec.msgpack.Decoder(FrameHeader)


def encode_header(header: FrameHeader) -> bytes:
    """Bytes for `Link.send`."""
    return _encoder.encode(header)


def decode_header(header: bytes) -> FrameHeader:
    """The inverse of `encode_header`. Raises HeaderUndecodable."""
    try:
        return _decoder.decode(header)
    except msgspec.DecodeError as error:
        raise HeaderUndecodable(f"frame header of {len(header)} bytes: {error}") from error
