"""What a host's Link hands its calls to, for tests of the Link alone."""

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

import torch

from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.port import Answer
from libs.model.layer import Layer
from libs.placement.module import Module, whole_layers
from libs.placement.placement import HostedModuleStatus

Answerer = Callable[[HostedCall, Answer], None]


def nothing(call: HostedCall, answer: Answer) -> None:
    answer.give(torch.empty(0))


@dataclass
class Kept:
    """Hosting that keeps what it is given."""

    modules: dict[tuple[str, str], MutableMapping[int, Layer] | None] = field(default_factory=dict)
    refusal: Exception | None = None
    answerer: Answerer = nothing
    calls: list[HostedCall] = field(default_factory=list)
    num_weight_bytes: int = 0
    """That the modules were opened with."""
    may_open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_open.set()

    async def open(
        self,
        guest: str,
        move_id: str,
        module: Module,
        *,
        num_blocks_wanted: int,
        num_blocks_least: int,
        layers: MutableMapping[int, Layer] | None,
        weight_bytes: int = 0,
    ) -> int:
        await self.may_open.wait()
        if self.refusal is not None:
            raise self.refusal
        self.modules[guest, move_id] = layers
        self.num_weight_bytes += weight_bytes
        return num_blocks_wanted

    def call(self, guest: str, call: HostedCall, answer: Answer) -> None:
        self.calls.append(call)
        self.answerer(call, answer)

    async def close(self, guest: str, move_id: str) -> None:
        self.modules.pop((guest, move_id), None)

    async def close_owner(self, guest: str) -> None:
        self.modules = {key: layers for key, layers in self.modules.items() if key[0] != guest}

    def hosted(self) -> tuple[HostedModuleStatus, ...]:
        return tuple(
            HostedModuleStatus(
                move_id=move_id, owner=guest, module=whole_layers(0, 1), num_blocks=1, num_bytes=1
            )
            for guest, move_id in self.modules
        )
