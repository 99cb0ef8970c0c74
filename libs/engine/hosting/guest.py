"""A home whose modules run here, as its host sees it."""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from kernels.paged_attention.contract import PagedAttention
from libs.engine.arena import Region
from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.hosted_kv import HostedKv
from libs.engine.hosting.hosted_step import BadCall, HostedStep
from libs.engine.hosting.lent_context import LentContext
from libs.engine.hosting.port import Answer, HostLost
from libs.model.model import Model
from libs.placement.module import Module, ModuleKind


@dataclass(eq=False)
class HostedModule:
    """One module and what it takes here."""

    move_id: str
    module: Module
    kv: HostedKv
    region: Region
    attention: PagedAttention
    model: Model | None
    """With the weights of the module's layers and no others; None where no weights are needed."""
    uses_own_weights: bool
    lent: tuple[HostedStep, int, LentContext] | None = None
    """Of the last step that asked."""


@dataclass(eq=False)
class Guest:
    """One home, its modules here, and what it waits for."""

    name: str
    modules: dict[str, HostedModule] = field(default_factory=dict[str, HostedModule])
    calls: deque[tuple[HostedCall, Answer]] = field(default_factory=deque[tuple[HostedCall, Answer]])
    step: HostedStep | None = None
    under_way: Generator[None] | None = None
    awaited: Answer | None = None
    """Of the call under way."""
    busy_with: HostedModule | None = None
    """What the call under way uses over its pauses."""
    error: HostLost | None = None
    """What broke it; it stays broken."""
    overrun: HostLost | None = None
    """Calls were lost, told by the thread that lost them: breaks it before the next call."""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to run."""
        return self.under_way is not None or bool(self.calls)

    def any_module(self, move_id: str) -> HostedModule:
        """Raises BadCall."""
        if move_id not in self.modules:
            raise BadCall(f"no module that move {move_id!r} brought is here")
        return self.modules[move_id]

    def module(self, move_id: str, kind: ModuleKind) -> HostedModule:
        """Raises BadCall."""
        found = self.any_module(move_id)
        if found.module.kind is not kind:
            raise BadCall(f"the module of {move_id!r} is one of {found.module.kind.value}, not {kind.value}")
        return found
