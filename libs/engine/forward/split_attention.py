"""Attention of one layer that runs here, wherever parts of its KV lie.

`store` writes keys and values, and lets hosts begin; what it returns attends here meanwhile, waits for them
and joins the parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.paged_attention.contract import PagedAttention, merge_attended
from libs.engine.forward.ragged import StepTensors
from libs.engine.forward.remote_kv import Hosts
from libs.engine.hosting.calls import Attend, AttendLent
from libs.engine.hosting.port import Answer
from libs.placement.placement import PlacedModule

Attended = Callable[[], torch.Tensor]
"""Attended values `[T, Hq, head_dim]`. Raises HostLost."""


class LayerAttention(Protocol):
    """One layer's."""

    def store(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepTensors) -> Attended:
        """Raises HostLost."""
        ...


class WholeAttention:
    """All KV of the layer lies here."""

    def __init__(self, attention: PagedAttention, kv: torch.Tensor, scale: float) -> None:
        self._attention, self._kv, self._scale = attention, kv, scale

    def store(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepTensors) -> Attended:
        """See LayerAttention."""
        self._attention.write_kv(k, v, self._kv, step.slots)
        return lambda: self._attention.attend(q, self._kv, step.attention, self._scale)


class HeadsAttention:
    """Some KV heads are at hosts. Heads know nothing of each other, so their results stand side by side."""

    def __init__(
        self,
        own: WholeAttention,
        hosts: Hosts,
        layer: int,
        away: Sequence[PlacedModule],
        *,
        num_kv_heads: int,
        num_queries_per_head: int,
    ) -> None:
        self._own, self._hosts, self._layer = own, hosts, layer
        gone = {head for placed in away for head in placed.module.kv_heads}
        here = [head for head in range(num_kv_heads) if head not in gone]
        self._here = _of_heads(here, num_queries_per_head)
        self._away = [
            _AwayHeads(placed, *_of_heads(placed.module.kv_heads, num_queries_per_head)) for placed in away
        ]

    def store(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepTensors) -> Attended:
        """See LayerAttention."""
        answers = [self._ask(part, q, k, v, step) for part in self._away]
        queries, keys = self._here
        own = self._own.store(q[:, queries], k[:, keys], v[:, keys], step)

        def attended() -> torch.Tensor:
            joined = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            joined[:, queries] = own()
            for part, answer in zip(self._away, answers, strict=True):
                theirs = self._hosts.wait(part.placed.worker, answer)
                joined[:, part.queries] = theirs.to(q.device)
            return joined

        return attended

    def _ask(
        self, part: "_AwayHeads", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepTensors
    ) -> Answer:
        self._hosts.begin(part.placed.worker, step.begin)
        call = Attend(
            part.placed.move_id,
            self._layer,
            q[:, part.queries].contiguous(),
            k[:, part.keys].contiguous(),
            v[:, part.keys].contiguous(),
        )
        return self._hosts.call(part.placed.worker, call)


class RemoteBlocksAttention:
    """Some blocks may be remote: both sides attend to what they hold, and the parts are merged."""

    def __init__(
        self,
        attention: PagedAttention,
        kv: torch.Tensor,
        scale: float,
        hosts: Hosts,
        layer: int,
        remote: PlacedModule,
    ) -> None:
        self._attention, self._kv, self._scale = attention, kv, scale
        self._whole = WholeAttention(attention, kv, scale)
        self._hosts, self._layer, self._remote = hosts, layer, remote

    def store(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepTensors) -> Attended:
        """See LayerAttention."""
        part, worker = step.own, self._remote.worker
        if part is None:
            return self._whole.store(q, k, v, step)
        self._hosts.begin(worker, step.begin)
        call = AttendLent(
            self._remote.move_id, self._layer, len(self._kv), q.contiguous(), k.contiguous(), v.contiguous()
        )
        answer = self._hosts.call(worker, call)
        if len(part.tokens):
            self._attention.write_kv(k[part.tokens], v[part.tokens], self._kv, part.slots)

        def attended() -> torch.Tensor:
            own, own_lse = self._attention.attend_with_lse(q, self._kv, part.batch, self._scale)
            theirs = self._hosts.wait(worker, answer).to(q.device)
            return merge_attended([own, theirs[..., :-1]], [own_lse, theirs[..., -1]])[0]

        return attended


@dataclass(frozen=True)
class _AwayHeads:
    placed: PlacedModule
    queries: slice | list[int]
    keys: slice | list[int]


def _of_heads(kv_heads: Sequence[int], num_queries: int) -> tuple[slice | list[int], slice | list[int]]:
    """Indices of the query heads and of the KV heads; slices, which copy nothing, where they are adjacent."""
    first, last = kv_heads[0], kv_heads[-1]
    if last - first + 1 == len(kv_heads):
        return slice(first * num_queries, (last + 1) * num_queries), slice(first, last + 1)
    queries = [head * num_queries + index for head in kv_heads for index in range(num_queries)]
    return queries, list(kv_heads)
