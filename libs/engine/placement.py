"""Who runs which layer of one instance, and who holds which KV head of it.

A worker is named by its incarnation. A placement is a value: a move makes a new one with a higher epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from libs.engine.errors import BadPlacement


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers `first <= layer < end` that one worker runs, so that activations stay with it."""

    worker: str
    first: int
    end: int

    @property
    def layers(self) -> range:
        """The layers, in the order they are run."""
        return range(self.first, self.end)


@dataclass(frozen=True)
class Placement:
    """`runs_layer[layer]` is a worker; `holds_head[layer][kv_head]` is the worker with that head's KV."""

    home: str
    epoch: int
    runs_layer: tuple[str, ...]
    holds_head: tuple[tuple[str, ...], ...]

    def layer_runs(self) -> Iterator[LayerRun]:
        """All layers in order, consecutive ones of one worker together."""
        for worker, group in groupby(enumerate(self.runs_layer), key=lambda pair: pair[1]):
            layers = [layer for layer, _ in group]
            yield LayerRun(worker, layers[0], layers[-1] + 1)

    def resident_slots(self, worker: str) -> tuple[tuple[int, int], ...]:
        """The `(layer, kv_head)` pairs whose KV `worker` holds, in order; heads of a layer are adjacent."""
        return tuple(
            (layer, head)
            for layer, holders in enumerate(self.holds_head)
            for head, holder in enumerate(holders)
            if holder == worker
        )


def all_home(home: str, num_layers: int, num_kv_heads: int, *, epoch: int = 0) -> Placement:
    """The placement of an instance that keeps everything on its own worker."""
    return Placement(home, epoch, (home,) * num_layers, ((home,) * num_kv_heads,) * num_layers)


def check_placement(placement: Placement, *, num_layers: int, num_kv_heads: int) -> None:
    """Raises BadPlacement where the shapes are not the model's, or a module lives on another worker.

    Other workers are refused because nothing here can call them.
    """
    shape = (len(placement.runs_layer), {len(holders) for holders in placement.holds_head})
    if len(placement.holds_head) != num_layers or shape != (num_layers, {num_kv_heads}):
        raise BadPlacement(
            f"placement of epoch {placement.epoch} has {shape[0]} layers with {sorted(shape[1])} KV heads, "
            f"the model has {num_layers} layers with {num_kv_heads}"
        )
    named = set(placement.runs_layer).union(*placement.holds_head)
    if foreign := sorted(named - {placement.home}):
        raise BadPlacement(
            f"placement of epoch {placement.epoch} puts modules on {', '.join(foreign)}; "
            f"this engine runs only what its own worker {placement.home} holds"
        )
