"""Where layers that left a model are read again."""

from typing import Protocol

from libs.model.layer import Layer


class LayerSource(Protocol):
    """What a model was loaded from. It holds no weights."""

    def read_layers(self, layers: range) -> dict[int, Layer]:
        """These layers, bit for bit as they were first read; for any thread.

        Raises:
            SourceChanged: what is there now would give other weights, or nothing is.
        """
        ...
