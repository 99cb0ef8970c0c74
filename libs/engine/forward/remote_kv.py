"""KV of all layers and heads of the instance, wherever it lies: reads join it, writes split it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from libs.engine.hosting.calls import ANSWERED, BeginStep, HostedCall, ReadBlocks, WriteBlocks
from libs.engine.hosting.port import Answer, Host, HostLost
from libs.engine.memory.pool import Pool
from libs.engine.meter import Meter
from libs.placement.module import ModuleKind
from libs.placement.placement import PlacedModule, Placement

Wait = Callable[[str, Answer], torch.Tensor]
"""Returns what this worker answers once it is there; raises HostLost."""


def result_now(worker: str, answer: Answer) -> torch.Tensor:
    """The wait for hosts that answer before `call` returns."""
    return answer.result()


class Hosts:
    """By incarnation. `waiting` measures the time spent waiting for their answers."""

    def __init__(self, wait: Wait, waiting: Meter) -> None:
        self._wait, self._waiting = wait, waiting
        self._hosts: dict[str, Host] = {}
        self._begun: dict[str, BeginStep] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._hosts

    def add(self, host: Host) -> None:
        """From now on it can be asked; a newer Host of the same worker replaces the older one."""
        self._hosts[host.worker] = host
        self._begun.pop(host.worker, None)

    def keep(self, workers: Iterable[str]) -> None:
        """Forgets all others."""
        kept = set(workers)
        self._hosts = {worker: host for worker, host in self._hosts.items() if worker in kept}
        self._begun = {worker: step for worker, step in self._begun.items() if worker in kept}

    def begin(self, worker: str, step: BeginStep) -> None:
        """Tells the host the arrays of a step, unless they are what it heard last: a step that was put aside
        tells them again."""
        if self._begun.get(worker) is not step:
            self.call(worker, step)
            self._begun[worker] = step

    def call(self, worker: str, call: HostedCall) -> Answer:
        """Raises HostLost where nothing is known of the worker any more. Waits where too much is unsent."""
        host = self._hosts.get(worker)
        if host is None:
            raise HostLost(worker, "no Link to it is known here")
        answer = host.call(call)
        if not isinstance(call, ANSWERED) and not answer.is_done:
            with suppress(HostLost):  # the next call that has an answer tells
                self.wait(worker, answer)
        return answer

    def call_all(self, call: HostedCall) -> None:
        """A small call without an answer, to every host. Does not wait."""
        for host in self._hosts.values():
            host.call(call)

    def wait(self, worker: str, answer: Answer) -> torch.Tensor:
        """What the worker's call gave. Raises HostLost."""
        if answer.is_done:
            return answer.result()
        self._waiting.begin()
        try:
            return self._wait(worker, answer)
        finally:
            self._waiting.end(0)

    def ask(self, worker: str, call: HostedCall) -> torch.Tensor:
        """Calls and waits. Raises HostLost."""
        return self.wait(worker, self.call(worker, call))


Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Part:
    """What a module, or one layer of it, has of the KV that is read or written."""

    placed: PlacedModule
    layer: int | None
    rows: Int64
    """Which of the blocks."""
    blocks: Int64
    """Their ids at the host."""
    columns: list[int]
    """Which of the slots, in the order of the module."""


class WholeKv:
    """Reads and writes blocks `[n, slots, 2, block_size, head_dim]`, slots being all heads of the layers
    asked for, in order."""

    def __init__(self, pool: Pool, hosts: Hosts, placement: Placement) -> None:
        self._pool, self.hosts = pool, hosts
        self.placement = placement

    def read(self, layers: range, blocks: Int64) -> torch.Tensor:
        """A copy. Raises HostLost."""
        if not self.placement.placed:
            return self._read_own(layers, blocks)
        asked = [(part, self._ask(part)) for part in self._parts(layers, blocks)]
        whole = self._empty(len(layers), len(blocks))
        rows, columns, sources = self._own(layers, blocks)
        if len(rows) and columns:
            own = self._pool.blocks.index_select(0, self._ids(blocks[rows]))
            whole[_grid(rows, columns)] = own[:, sources]
        for part, answer in asked:
            kv = self.hosts.wait(part.placed.worker, answer)
            whole[_grid(part.rows, part.columns)] = kv.to(whole.device)
        return whole

    def write(self, layer: int, blocks: Int64, kv: torch.Tensor) -> None:
        """KV of all heads of one layer. Does not wait for hosts: what breaks there is told by the next read
        or step."""
        kv = kv.to(self._pool.blocks.device)
        if not self.placement.placed:
            self._pool.layer(layer)[self._ids(blocks)] = kv
            return
        rows, columns, sources = self._own(range(layer, layer + 1), blocks)
        if len(rows) and columns:
            self._pool.blocks[_grid(blocks[rows], sources)] = kv[_grid(rows, columns)]
        for part in self._parts(range(layer, layer + 1), blocks):
            sent = kv[_grid(part.rows, part.columns)]  # a copy: the caller may change its own afterwards
            call = WriteBlocks(part.placed.move_id, layer, part.blocks, sent)
            self.hosts.call(part.placed.worker, call)

    def _ask(self, part: _Part) -> Answer:
        call = ReadBlocks(part.placed.move_id, part.layer, part.blocks)
        return self.hosts.call(part.placed.worker, call)

    def _read_own(self, layers: range, blocks: Int64) -> torch.Tensor:
        num_heads = self.placement.num_kv_heads
        slots = self._pool.blocks[:, layers.start * num_heads : layers.stop * num_heads]
        return slots.index_select(0, self._ids(blocks))

    def _own(self, layers: range, blocks: Int64) -> tuple[Int64, list[int], list[int]]:
        """Which of the blocks lie here, which of the asked slots do, and where these are in a block."""
        num_heads = self.placement.num_kv_heads
        here = [
            ((layer - layers.start) * num_heads + head, source)
            for source, (layer, head) in enumerate(self._pool.layout.slots)
            if layer in layers
        ]
        rows = np.flatnonzero(blocks < self._pool.num_blocks)
        return rows, [column for column, _ in here], [source for _, source in here]

    def _parts(self, layers: range, blocks: Int64) -> Iterator[_Part]:
        num_heads, first_remote = self.placement.num_kv_heads, self._pool.num_blocks
        for placed in self.placement.placed:
            module = placed.module
            rows, ids = np.arange(len(blocks)), blocks
            if module.kind is ModuleKind.TOKENS:
                rows = np.flatnonzero(blocks >= first_remote)
                ids = blocks[rows] - first_remote
            shared = [layer for layer in module.layers if layer in layers]
            if not shared or not len(rows):
                continue
            groups = [shared] if len(shared) == len(module.layers) else [[layer] for layer in shared]
            for group in groups:
                columns = [
                    (layer - layers.start) * num_heads + head
                    for layer in group
                    for head in module.heads(num_heads)
                ]
                whole = len(group) == len(module.layers)
                yield _Part(placed, None if whole else group[0], rows, ids, columns)

    def _empty(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, num_layers * self.placement.num_kv_heads, *self._pool.blocks.shape[2:])
        return torch.empty(shape, dtype=self._pool.layout.dtype, device=self._pool.blocks.device)

    def _ids(self, blocks: Int64) -> torch.Tensor:
        return torch.from_numpy(blocks).to(self._pool.blocks.device)


def _grid(rows: Int64, columns: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexes every given row at every given column."""
    return torch.from_numpy(rows)[:, None], torch.tensor(columns)[None]
