"""What it costs to have a part of an instance on another worker: bytes, seconds of a move, seconds a step.

Source: BanaServe (arXiv 2510.13223) for the head split and the time of a layer move; the parts merged by
log-sum-exp are ours. Pure. Bytes are payload: headers and the arrays of a step, which go ahead of it and are
not waited for, are some KiB and left out.
"""

from typing import Protocol

import msgspec

from libs.placement.module import Module, ModuleKind

_FLOAT32_BYTES = 4


class LinkCost(msgspec.Struct, frozen=True):
    """A one-way message over the Link to a host takes `latency + bytes / rate` seconds."""

    bytes_per_second: float
    latency_seconds: float


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model decides the costs."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    element_bytes: int
    """Of weights, activations and KV."""
    layer_weight_bytes: int
    """Of one layer, as it travels."""
    layer_memory_bytes: int
    """Of one layer in memory: no less, as it may be kept twice."""
    block_size: int
    """Tokens of a KV block."""

    @property
    def layer_token_bytes(self) -> int:
        """KV of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """One KV block in all layers."""
        return self.num_layers * self.block_size * self.layer_token_bytes

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class TellsShape(Protocol):
    """A worker's presence, as far as it tells the shape of its model; 0 where it does not."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def element_bytes(self) -> int: ...  # noqa: D102
    @property
    def layer_weight_bytes(self) -> int: ...  # noqa: D102
    @property
    def layer_memory_bytes(self) -> int: ...  # noqa: D102
    @property
    def block_bytes(self) -> int: ...  # noqa: D102


def shape_of(presence: TellsShape) -> ModelShape | None:
    """The shape that a `Presence` tells; None where it does not tell all of it, as while it starts."""
    token_bytes = 2 * presence.num_layers * presence.num_kv_heads * presence.head_dim * presence.element_bytes
    shape = ModelShape(
        num_layers=presence.num_layers,
        num_heads=presence.num_heads,
        num_kv_heads=presence.num_kv_heads,
        head_dim=presence.head_dim,
        hidden_size=presence.hidden_size,
        element_bytes=presence.element_bytes,
        layer_weight_bytes=presence.layer_weight_bytes,
        layer_memory_bytes=presence.layer_memory_bytes,
        block_size=presence.block_bytes // token_bytes if token_bytes else 0,
    )
    return shape if all(msgspec.structs.astuple(shape)) else None


# Bytes


def heads_out_bytes(
    num_tokens: float, *, head_dim: int, num_heads: int, num_kv_heads: int, element_bytes: int = 2
) -> float:
    """Out to the host per layer and step: q of the moved query heads, k and v of the moved KV heads.
    `2*b*d*(h_q + 2*h_kv)` at 2 bytes an element."""
    return element_bytes * num_tokens * head_dim * (num_heads + 2 * num_kv_heads)


def heads_back_bytes(num_tokens: float, *, head_dim: int, num_heads: int, element_bytes: int = 2) -> float:
    """Back from the host per layer and step: what the moved query heads attended. `2*b*d*h_q` at 2 bytes."""
    return element_bytes * num_tokens * head_dim * num_heads


def hidden_bytes(num_tokens: float, *, hidden_size: int, element_bytes: int = 2) -> float:
    """Each way per run of layers and step: hidden states."""
    return element_bytes * num_tokens * hidden_size


def step_bytes(shape: ModelShape, module: Module, num_tokens: float) -> tuple[float, float]:
    """Bytes `(out, back)` of a step with `num_tokens` tokens: for LAYERS once for the run, for HEADS and
    TOKENS in each layer. Of a TOKENS module the most it can be: k and v of all the step's tokens."""
    if module.kind is ModuleKind.LAYERS:
        one_way = hidden_bytes(num_tokens, hidden_size=shape.hidden_size, element_bytes=shape.element_bytes)
        return one_way, one_way
    num_kv_heads = len(module.heads(shape.num_kv_heads))
    num_heads = num_kv_heads * shape.queries_per_kv_head
    out = heads_out_bytes(
        num_tokens,
        head_dim=shape.head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        element_bytes=shape.element_bytes,
    )
    if module.kind is ModuleKind.TOKENS:  # float32, and the log-sum-exp of each row beside it
        return out, _FLOAT32_BYTES * num_tokens * num_heads * (shape.head_dim + 1)
    back = heads_back_bytes(
        num_tokens, head_dim=shape.head_dim, num_heads=num_heads, element_bytes=shape.element_bytes
    )
    return out, back


def module_token_bytes(shape: ModelShape, module: Module) -> int:
    """KV of one token in a module; of a TOKENS module in all layers and heads."""
    num_slots = len(module.layers) * len(module.heads(shape.num_kv_heads))
    return num_slots * 2 * shape.head_dim * shape.element_bytes


def kv_bytes(shape: ModelShape, module: Module, num_blocks: float) -> float:
    """KV of so many blocks in a module: what a move copies of `num_blocks` live ones. A TOKENS module starts
    empty: on the way there nothing is copied, on the way back the lent blocks in use."""
    return num_blocks * shape.block_size * module_token_bytes(shape, module)


def weight_bytes(shape: ModelShape, module: Module, *, with_weights: bool) -> int:
    """Weights that travel: none where the host has the model, and none for heads and lent blocks."""
    return _num_travelling_layers(module, with_weights=with_weights) * shape.layer_weight_bytes


def weight_memory_bytes(shape: ModelShape, module: Module, *, with_weights: bool) -> int:
    """What weights that travel take in the memory of a worker whose model has this shape."""
    return _num_travelling_layers(module, with_weights=with_weights) * shape.layer_memory_bytes


def _num_travelling_layers(module: Module, *, with_weights: bool) -> int:
    """Those that take their weights along."""
    return len(module.layers) if with_weights and module.kind is ModuleKind.LAYERS else 0


# Seconds


def send_seconds(link: LinkCost, num_bytes: float) -> float:
    """One message, one way."""
    return link.latency_seconds + num_bytes / link.bytes_per_second


def move_seconds(link: LinkCost, weight_bytes: float, kv_bytes: float, *, sync_seconds: float = 0.0) -> float:
    """A whole move, `T = (S_weights + S_kv)/B + T_sync`; the home serves on meanwhile."""
    return (weight_bytes + kv_bytes) / link.bytes_per_second + sync_seconds


def layer_overhead_seconds(
    link: LinkCost,
    out_bytes: float,
    back_bytes: float,
    *,
    remote_attention_seconds: float = 0.0,
    local_attention_seconds: float = 0.0,
) -> float:
    """What a step waits in one layer for the attention of another worker, which runs beside the home's own:
    `max(0, out/B + lat + remote attention + back/B + lat - local attention)`."""
    away = send_seconds(link, out_bytes) + remote_attention_seconds + send_seconds(link, back_bytes)
    return max(0.0, away - local_attention_seconds)


def run_overhead_seconds(link: LinkCost, shape: ModelShape, num_tokens: float) -> float:
    """What a step waits for hidden states to go to a run of layers and come back; the layers themselves take
    their time wherever they are."""
    one_way = hidden_bytes(num_tokens, hidden_size=shape.hidden_size, element_bytes=shape.element_bytes)
    return 2 * send_seconds(link, one_way)


def step_overhead_seconds(
    link: LinkCost,
    shape: ModelShape,
    module: Module,
    num_tokens: float,
    *,
    remote_attention_seconds: float = 0.0,
    local_attention_seconds: float = 0.0,
) -> float:
    """What a step with `num_tokens` tokens takes longer for a module that is away; 0 for no tokens.

    The attention seconds are of one layer of this step: of the module's part on the host, and of what is left
    at home, which run at the same time. They do not matter to a run of layers.

    Raises ValueError for negative tokens.
    """
    if num_tokens < 0:
        raise ValueError(f"a step cannot have {num_tokens} tokens")
    if num_tokens == 0:
        return 0.0
    if module.kind is ModuleKind.LAYERS:
        return run_overhead_seconds(link, shape, num_tokens)
    out_bytes, back_bytes = step_bytes(shape, module, num_tokens)
    return len(module.layers) * layer_overhead_seconds(
        link,
        out_bytes,
        back_bytes,
        remote_attention_seconds=remote_attention_seconds,
        local_attention_seconds=local_attention_seconds,
    )
