"""A part of an instance that can live on another worker than its owner."""

from enum import Enum

import msgspec


class ModuleKind(Enum):
    """How an instance is cut."""

    LAYERS = "layers"
    """Whole consecutive layers: their weights compute there, and their KV lies there."""
    HEADS = "heads"
    """KV heads of consecutive layers: their KV lies there, and their attention is computed there."""
    TOKENS = "tokens"
    """Whole blocks, all layers and heads of their tokens; the owner merges the parts of an attention."""


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """Layers `first_layer <= layer < end_layer`; with `kv_heads` only these heads of each, in rising order.

    A TOKENS module has all layers and no heads named: it is so many blocks that the host lends.
    """

    kind: ModuleKind
    first_layer: int
    end_layer: int
    kv_heads: tuple[int, ...] = ()

    @property
    def layers(self) -> range:
        """The layers, in the order they are run."""
        return range(self.first_layer, self.end_layer)

    def heads(self, num_kv_heads: int) -> tuple[int, ...]:
        """The KV heads of each layer that it has, of the model's `num_kv_heads`."""
        return self.kv_heads if self.kind is ModuleKind.HEADS else tuple(range(num_kv_heads))

    def slots(self, num_kv_heads: int) -> tuple[tuple[int, int], ...]:
        """Its `(layer, kv_head)` pairs in order; heads of a layer are adjacent."""
        return tuple((layer, head) for layer in self.layers for head in self.heads(num_kv_heads))


def whole_layers(first_layer: int, end_layer: int) -> Module:
    """A run of layers."""
    return Module(kind=ModuleKind.LAYERS, first_layer=first_layer, end_layer=end_layer)


def heads_of(first_layer: int, end_layer: int, kv_heads: tuple[int, ...]) -> Module:
    """Some KV heads of a run of layers."""
    return Module(
        kind=ModuleKind.HEADS, first_layer=first_layer, end_layer=end_layer, kv_heads=tuple(sorted(kv_heads))
    )


def remote_blocks(num_layers: int) -> Module:
    """Blocks that the host lends."""
    return Module(kind=ModuleKind.TOKENS, first_layer=0, end_layer=num_layers)


def module_in_words(module: Module) -> str:
    """`layers 20-29`, `KV heads 1, 2 of layers 0-29`, `lent blocks`."""
    if module.kind is ModuleKind.TOKENS:
        return "lent blocks"
    last = module.end_layer - 1
    layers = f"layer {last}" if module.first_layer == last else f"layers {module.first_layer}-{last}"
    if module.kind is ModuleKind.LAYERS:
        return layers
    heads = ", ".join(str(head) for head in module.kv_heads)
    return f"KV head{'s' if len(module.kv_heads) > 1 else ''} {heads} of {layers}"
