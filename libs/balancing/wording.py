"""Moves in words, for people."""

from libs.balancing.mesh_view import BringHome, Flip, MoveAway
from libs.placement.module import Module, ModuleKind


def module_in_words(module: Module) -> str:
    """`layers 20-29`, `KV heads 1,2 of layers 0-29`, `lent blocks`."""
    last = module.end_layer - 1
    layers = f"layer {last}" if last == module.first_layer else f"layers {module.first_layer}-{last}"
    if module.kind is ModuleKind.TOKENS:
        return "lent blocks"
    if module.kind is ModuleKind.HEADS:
        return f"KV heads {','.join(map(str, module.kv_heads))} of {layers}"
    return layers


def move_in_words(move: MoveAway | BringHome | Flip) -> str:
    """`layers 20-29`, `layers 20-29 with weights`, `home: layers 20-29`, `flip to decode`."""
    match move:
        case MoveAway(module=module, with_weights=with_weights):
            return module_in_words(module) + (" with weights" if with_weights else "")
        case BringHome(module=module):
            return f"home: {module_in_words(module)}"
        case Flip(to=to):
            return f"flip to {to.value}"
