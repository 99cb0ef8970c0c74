"""The layout of packed weights: panels of 32 columns, depth-major, two bfloat16 (or one float32) to a word.

`[N, K]` becomes `[panels, words of K, 32, elements per word]`, N and K padded with zeros. In a gated weight a
panel holds 16 columns of gate and the same 16 of up.
"""

import torch

PANEL_COLUMNS = 32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`[N, K]` in panels."""
    return _pack_panels(_padded(weight, PANEL_COLUMNS))


def unpack(packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The `[N, K]` that `pack` was given."""
    return _unpack_panels(packed)[: shape[0], : shape[1]].contiguous()


def pack_gated(weight: torch.Tensor) -> torch.Tensor:
    """`[2 * ff, K]`, gate above up, in panels of both."""
    half = PANEL_COLUMNS // 2
    gate, up = (_padded(part, half) for part in weight.chunk(2))
    paired = torch.stack((gate.view(-1, half, gate.shape[1]), up.view(-1, half, up.shape[1])), dim=1)
    return _pack_panels(paired.reshape(-1, gate.shape[1]))


def unpack_gated(packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The `[2 * ff, K]` that `pack_gated` was given."""
    half = PANEL_COLUMNS // 2
    plain = _unpack_panels(packed)
    gate_up = plain.view(-1, 2, half, plain.shape[1]).transpose(0, 1).reshape(2, -1, plain.shape[1])
    return gate_up[:, : shape[0] // 2, : shape[1]].reshape(shape)


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    per_word = 4 // weight.element_size()
    rows, columns = -weight.shape[0] % multiple, -weight.shape[1] % per_word
    return torch.nn.functional.pad(weight, (0, columns, 0, rows)) if rows or columns else weight


def _pack_panels(padded: torch.Tensor) -> torch.Tensor:
    per_word = 4 // padded.element_size()
    return (
        padded.reshape(-1, PANEL_COLUMNS, padded.shape[1] // per_word, per_word).transpose(1, 2).contiguous()
    )


def _unpack_panels(packed: torch.Tensor) -> torch.Tensor:
    num_panels, num_words, _, per_word = packed.shape
    return packed.transpose(1, 2).reshape(num_panels * PANEL_COLUMNS, num_words * per_word)
