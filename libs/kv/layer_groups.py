"""How many layers share a frame. Pure.

A frame costs its two ends some tenths of a millisecond, whatever its size. Blocks of a long prompt travel
layer by layer while the next one is computed; those of a short one are too small for that, and share frames.
"""

FRAME_BYTES = 1 << 20
"""Copied in about as long as a frame takes to handle. With a quarter of it, prompts of 64 tokens had their
first token 3 ms later."""


def layers_per_frame(num_layers: int, layer_bytes: int) -> int:
    """Layers of `layer_bytes` each that fill a frame; at least one, at most all."""
    return max(1, min(num_layers, FRAME_BYTES // max(1, layer_bytes)))


def layer_groups(num_layers: int, layer_bytes: int) -> list[range]:
    """All layers in order, those of one frame together."""
    step = layers_per_frame(num_layers, layer_bytes)
    return [range(first, min(first + step, num_layers)) for first in range(0, num_layers, step)]
