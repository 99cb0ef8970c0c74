"""What becomes of the engine's output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.engine.outputs import LayerOutput, SequenceFailed, TokenOutput


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """The engine's listener: for each event the one that it concerns. See EngineListener."""

    on_tokens: Callable[[Sequence[TokenOutput]], None]
    on_layer: Callable[[LayerOutput], None]
    on_prompt_done: Callable[[TokenOutput], None]
    on_names: Callable[[Sequence[bytes], Sequence[bytes]], None]
    on_failed: Callable[[SequenceFailed], None]
