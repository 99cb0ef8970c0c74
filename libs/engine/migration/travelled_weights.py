"""Weights that travelled with a module: what they freed here makes blocks, until they are back."""

from collections.abc import Iterable

from libs.engine.errors import WeightsLost
from libs.engine.memory.pool import Pool
from libs.model.errors import ModelError
from libs.model.layer import layer_bytes
from libs.model.model import Model
from libs.placement.placement import Placed


class TravelledWeights:
    """By the move that took them away."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._grown_bytes: dict[str, int] = {}

    @property
    def num_grown_bytes(self) -> int:
        """What the pool will have to give back for them."""
        return sum(self._grown_bytes.values())

    def num_bytes(self, move_id: str) -> int:
        """The part of one module."""
        return self._grown_bytes.get(move_id, 0)

    def num_bytes_of(self, placed: Placed, model: Model) -> int:
        """What a module would free if it left; nothing where its weights stay, or memory cannot grow (on
        CUDA)."""
        if placed.has_weights_at_home or model.device.type != "cpu":
            return 0
        return sum(layer_bytes(model.layer(layer)) for layer in placed.module.layers)

    def leave(self, placed: Placed, model: Model) -> None:
        """They go, and the pool's memory grows by as much."""
        self._grown_bytes[placed.move_id] = self._pool.grow(self.num_bytes_of(placed, model))

    def came_back(self, move_id: str) -> None:
        """The pool does not use their memory any more."""
        self._pool.shrink(self._grown_bytes.pop(move_id, 0))


def restored(model: Model, lost: Iterable[Placed]) -> Model:
    """The model with the weights that travelled read again. Raises WeightsLost."""
    for placed in lost:
        if placed.has_weights_at_home:
            continue
        layers = placed.module.layers
        try:
            model = model.with_layers(model.reload_layers(layers))
        except (ModelError, OSError) as error:
            raise WeightsLost(placed.worker, layers, error) from error
    return model
