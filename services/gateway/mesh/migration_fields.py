"""What may be asked of migrations, and the move that it means. Pure."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from libs.bus.messages.migration import StartMigration
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import Placement
from services.gateway.api.errors import BadRequest

MAX_LAYERS, MAX_HEADS = 10_000, 1_000
MAX_BLOCKS, MAX_EPOCH = 10**9, 2**53

Layer = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Head = Annotated[int, Meta(ge=0, lt=MAX_HEADS)]
WorkerName = Annotated[str, Meta(min_length=1, max_length=256)]


class MigrationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A module that is to move: `layers`, `kv_heads`, `tokens` to a `host`, or `return_of` home."""

    instance: (
        Annotated[
            WorkerName,
            Meta(description="its home: a worker's name or incarnation; return_of alone tells it, too"),
        ]
        | None
    ) = None
    host: Annotated[WorkerName, Meta(description="where it goes: name or incarnation")] | None = None
    layers: (
        Annotated[tuple[Layer, Layer], Meta(description="first and end; the end is not among them")] | None
    ) = None
    kv_heads: (
        Annotated[
            tuple[Head, ...],
            Meta(description="of the layers, or of all layers", min_length=1, max_length=MAX_HEADS),
        ]
        | None
    ) = None
    tokens: Annotated[bool, Meta(description="the host lends whole blocks")] = False
    num_blocks: (
        Annotated[
            int,
            Meta(
                description="that the host is to hold or lend; none: what it can spare, and of layers and "
                "heads at least as many as the home has",
                ge=1,
                le=MAX_BLOCKS,
            ),
        ]
        | None
    ) = None
    return_of: (
        Annotated[
            str, Meta(description="the move that brought away what comes home", min_length=1, max_length=256)
        ]
        | None
    ) = None
    kind: (
        Annotated[
            Literal["migrate", "offload"],
            Meta(description="of layers: weights travel, or the host has the same ones; none: migrate"),
        ]
        | None
    ) = None
    expected_epoch: (
        Annotated[int, Meta(description="refused with 409 unless the placement has it", ge=0, le=MAX_EPOCH)]
        | None
    ) = None


def check_shape(asked: MigrationRequest) -> None:
    """Raises BadRequest where the fields do not make one move; `param` names the one that is wrong."""
    module = [name for name in ("layers", "kv_heads") if getattr(asked, name) is not None]
    ways = [*(["module"] if module else []), *(["tokens"] if asked.tokens else [])]
    ways += ["return_of"] if asked.return_of is not None else []
    if len(ways) != 1:
        said = "give one of layers, kv_heads, tokens, return_of" + (", not several" if ways else "")
        raise BadRequest(said, param="return_of" if "return_of" in ways else "layers")
    if asked.layers is not None and asked.layers[0] >= asked.layers[1]:
        first, end = asked.layers
        raise BadRequest(f"layers: [{first}, {end}] are none; the end must be greater", param="layers")
    if asked.kv_heads is not None and len(set(asked.kv_heads)) < len(asked.kv_heads):
        said = f"kv_heads: {list(asked.kv_heads)} names a head twice; name each once"
        raise BadRequest(said, param="kv_heads")
    if asked.kind is not None and module != ["layers"]:
        said = f"kind {asked.kind!r} is for whole layers; leave it out with kv_heads, tokens and return_of"
        raise BadRequest(said, param="kind")
    if asked.num_blocks is not None and asked.return_of is not None:
        raise BadRequest(
            "num_blocks is for modules that leave; leave it out with return_of", param="num_blocks"
        )
    _check_workers(asked)


def _check_workers(asked: MigrationRequest) -> None:
    if (asked.host is None) != (asked.return_of is not None):
        said = (
            "return_of brings a module home from where it is; leave host out"
            if asked.host
            else "host is missing: name the worker that the module moves to"
        )
        raise BadRequest(said, param="host")
    if asked.instance is None and asked.return_of is None:
        said = "instance is missing: name the worker that is the module's home"
        raise BadRequest(said, param="instance")


def order_of(
    asked: MigrationRequest, placement: Placement, *, move_id: str, host: str, deadline_seconds: float
) -> StartMigration:
    """The order for the owner of the module, whose placement this is; `host` is an incarnation."""
    epoch = placement.epoch if asked.expected_epoch is None else asked.expected_epoch
    return StartMigration(
        move_id=move_id,
        module=_module(asked, placement.num_layers),
        returned_move_id=asked.return_of or "",
        host=host,
        with_weights=asked.layers is not None and asked.kv_heads is None and asked.kind != "offload",
        num_blocks=asked.num_blocks or 0,
        expected_epoch=epoch,
        deadline_seconds=deadline_seconds,
        reason="manual",
    )


def module_param(asked: MigrationRequest) -> str:
    """The field that names the module."""
    return next(
        (name for name in ("return_of", "kv_heads", "layers") if getattr(asked, name) is not None), "tokens"
    )


def _module(asked: MigrationRequest, num_layers: int) -> Module | None:
    if asked.return_of is not None:
        return None
    if asked.tokens:
        return remote_blocks(num_layers)
    first, end = asked.layers or (0, num_layers)
    if asked.kv_heads is not None:
        return heads_of(first, end, asked.kv_heads)
    return whole_layers(first, end)
