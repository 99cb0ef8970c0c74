"""The model that is served: its names, its language once loaded, its context length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.gateway.api.errors import NotFound, Unavailable
from services.gateway.generation.language import Language
from services.gateway.generation.prompt_names import BlockLayout


class ServedModel:
    """What requests ask about the model. `worker_len` tells the shortest context of the workers, if known."""

    def __init__(
        self,
        names: tuple[str, ...],
        max_model_len: int,
        created: int,
        *,
        worker_len: Callable[[], int | None],
        place_model: Callable[[], str],
        layout: Callable[[], BlockLayout | None],
    ) -> None:
        self.names = names
        self._max_model_len, self._created, self._worker_len = max_model_len, created, worker_len
        self.place_model = place_model
        """What the router chooses instances by; empty: any."""
        self.layout = layout
        """How its workers name blocks; None while none is ready."""
        self.language: Language | None = None

    def language_of(self, name: str | None) -> Language:
        """The language of the model called `name` (None: of the only one).

        Raises NotFound for another name, Unavailable until it is loaded.
        """
        if name is not None:
            self.check_name(name)
        if self.language is None:
            raise Unavailable("the tokenizer is still loading", code="starting", retry_after_seconds=1)
        return self.language

    def check_name(self, name: str) -> None:
        """Raise NotFound unless the model goes by this name."""
        if name not in self.names:
            raise NotFound(
                f"the model {name!r} does not exist; served is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens: the least of setting, model and workers."""
        limits = [self._max_model_len or None, self._worker_len()]
        if self.language is not None:
            limits.append(self.language.max_position_embeddings)
        return min(limit for limit in [*limits, 2**31] if limit is not None)

    def card(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvmesh",
            "max_model_len": self.max_model_len(),
        }


def default_name(model: str) -> str:
    """The name that clients use: the model as it was given, but of a path only its last part."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
