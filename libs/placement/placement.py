"""Who runs which layer of one instance, and who holds which KV head of it.

A worker is named by its incarnation. A placement is a value: a migration makes a new one with the next epoch.
"""

from collections.abc import Iterator
from itertools import groupby

import msgspec

from libs.placement.module import Module, ModuleKind


class BadPlacement(Exception):
    """A module that the instance does not have, or that is away already; says which."""


class PlacedModule(msgspec.Struct, frozen=True, kw_only=True):
    """One module that is at a host."""

    move_id: str
    """Of the migration that brought it there; its name ever since."""
    module: Module
    worker: str
    has_weights_at_owner: bool = True
    """False: they travelled with it."""
    num_blocks: int = 0
    """That the host holds for it; of a TOKENS module, that it lends."""


class HostedModuleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A module of another instance that this worker runs."""

    move_id: str
    owner: str
    module: Module
    num_blocks: int
    num_bytes: int
    """KV and weights, of this worker's memory."""


class LayerRun(msgspec.Struct, frozen=True):
    """Consecutive layers `first <= layer < end` that one worker runs, so that activations stay with it."""

    worker: str
    first: int
    end: int
    move_id: str = ""
    """Of the module that these layers are; empty at the owner."""

    @property
    def layers(self) -> range:
        """The layers, in the order they are run."""
        return range(self.first, self.end)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Everything is at its `owner` but what is `placed` elsewhere."""

    owner: str
    num_layers: int
    num_kv_heads: int
    epoch: int = 0
    placed: tuple[PlacedModule, ...] = ()

    def get(self, move_id: str) -> PlacedModule | None:
        """The module that this migration brought to a host."""
        return next((one for one in self.placed if one.move_id == move_id), None)

    def runner_of(self, layer: int) -> PlacedModule | None:
        """The module that a layer belongs to as a whole; None where the owner runs it."""
        return next((one for one in self._with_layer(layer) if one.module.kind is ModuleKind.LAYERS), None)

    def heads_away(self, layer: int) -> list[PlacedModule]:
        """Modules that hold some KV heads of a layer which the owner runs."""
        return [one for one in self._with_layer(layer) if one.module.kind is ModuleKind.HEADS]

    def remote_blocks(self) -> list[PlacedModule]:
        """Modules that are blocks, in the order in which they came."""
        return [one for one in self.placed if one.module.kind is ModuleKind.TOKENS]

    def layer_runs(self) -> Iterator[LayerRun]:
        """All layers in order, consecutive ones of one module together."""
        owners = [self.runner_of(layer) for layer in range(self.num_layers)]
        first = 0
        for owner, group in groupby(owners):
            end = first + len(list(group))
            yield (
                LayerRun(owner.worker, first, end, owner.move_id)
                if owner
                else LayerRun(self.owner, first, end)
            )
            first = end

    def resident_slots(self) -> tuple[tuple[int, int], ...]:
        """The `(layer, kv_head)` pairs whose KV the owner holds, in order; heads of a layer are adjacent."""
        away = {
            slot
            for one in self.placed
            if one.module.kind is not ModuleKind.TOKENS
            for slot in one.module.slots(self.num_kv_heads)
        }
        return tuple(
            (layer, head)
            for layer in range(self.num_layers)
            for head in range(self.num_kv_heads)
            if (layer, head) not in away
        )

    def with_module(self, placed: PlacedModule) -> "Placement":
        """The placement after an outbound migration, under the next epoch. Raises BadPlacement."""
        check_module(self, placed.module)
        return msgspec.structs.replace(self, epoch=self.epoch + 1, placed=(*self.placed, placed))

    def without(self, move_id: str) -> "Placement":
        """The placement after this module came back, under the next epoch. Raises BadPlacement."""
        if self.get(move_id) is None:
            raise BadPlacement(f"no module that move {move_id} brought away is away")
        rest = tuple(one for one in self.placed if one.move_id != move_id)
        return msgspec.structs.replace(self, epoch=self.epoch + 1, placed=rest)

    def without_worker(self, worker: str) -> "Placement":
        """The placement after a host was lost, under the next epoch."""
        rest = tuple(one for one in self.placed if one.worker != worker)
        return msgspec.structs.replace(self, epoch=self.epoch + 1, placed=rest)

    def _with_layer(self, layer: int) -> Iterator[PlacedModule]:
        return (one for one in self.placed if layer in one.module.layers)


def all_at_owner(owner: str, num_layers: int, num_kv_heads: int) -> Placement:
    """The placement of an instance that keeps everything on its own worker."""
    return Placement(owner=owner, num_layers=num_layers, num_kv_heads=num_kv_heads)


def check_module(placement: Placement, module: Module) -> None:
    """Raises BadPlacement where the instance has no such module, or a part of it is away already."""
    layers = f"layers [{module.first_layer}, {module.end_layer}]"
    if not 0 <= module.first_layer < module.end_layer <= placement.num_layers:
        raise BadPlacement(
            f"{layers} are no run of the {placement.num_layers} layers that the model has: name the first, "
            f"from 0, and the end, which is not among them, up to {placement.num_layers}"
        )
    heads = module.kv_heads
    if module.kind is ModuleKind.HEADS:
        is_rising = list(heads) == sorted(set(heads))
        if not heads or not is_rising or heads[0] < 0 or heads[-1] >= placement.num_kv_heads:
            raise BadPlacement(
                f"KV heads {list(heads)} are none of 0 to {placement.num_kv_heads - 1}; name some of these"
            )
        if len(heads) == placement.num_kv_heads:
            raise BadPlacement("all KV heads of a layer cannot leave it; move whole layers instead")
    elif heads:
        raise BadPlacement(f"a module of {module.kind.value} names no KV heads, not {list(heads)}")
    if (
        placement.placed
        and module.kind is not placement.placed[0].module.kind
        and (ModuleKind.TOKENS in (module.kind, placement.placed[0].module.kind))
    ):
        raise BadPlacement(f"lent blocks and other modules do not mix; {_bring_home(placement.placed)}")
    if module.kind is ModuleKind.TOKENS:
        if placement.placed:
            raise BadPlacement(f"one worker lends blocks already; {_bring_home(placement.placed)}")
        if len(module.layers) != placement.num_layers:
            raise BadPlacement(f"lent blocks have all {placement.num_layers} layers, not {layers}")
        return
    taken = set(placement.resident_slots())
    if lacking := [slot for slot in module.slots(placement.num_kv_heads) if slot not in taken]:
        raise BadPlacement(_away_words(placement, *lacking[0]))
    num_away = sum(placement.runner_of(layer) is not None for layer in range(placement.num_layers))
    if module.kind is ModuleKind.LAYERS and len(module.layers) + num_away == placement.num_layers:
        raise BadPlacement(
            f"{layers} cannot leave: all {placement.num_layers} layers would be away, and the home keeps at "
            "least one; name fewer"
        )
    _check_heads_left(placement, module)


def _away_words(placement: Placement, layer: int, head: int) -> str:
    """Of a layer and a KV head that are not at home."""
    if (placed := placement.runner_of(layer)) is not None:
        first, last = placed.module.first_layer, placed.module.end_layer - 1
        run = f"layer {layer}" if first == last else f"layer {layer}, with layers {first} to {last},"
        return f"{run} is away already; {_bring_home((placed,))}"
    holders = tuple(one for one in placement.heads_away(layer) if head in one.module.kv_heads)
    return f"KV head {head} of layer {layer} is away already; {_bring_home(holders)}"


def _bring_home(placed: tuple[PlacedModule, ...]) -> str:
    moves = ", ".join(one.move_id for one in placed)
    return f"first bring home what move{'s' * (len(placed) > 1)} {moves} brought away (return_of, --return)"


def _check_heads_left(placement: Placement, module: Module) -> None:
    """Home keeps at least one KV head of each layer that it runs: its block tables live there."""
    if module.kind is not ModuleKind.HEADS:
        return
    for layer in module.layers:
        away = tuple(placement.heads_away(layer))
        if sum(len(one.module.kv_heads) for one in away) + len(module.kv_heads) >= placement.num_kv_heads:
            raise BadPlacement(
                f"layer {layer} would keep no KV head at home; name fewer heads, or, to move it whole, "
                f"{_bring_home(away)}"
            )
