"""Where requests go: the live policies over the simulated instances, and the router's queue before them.

As if the router's view were exact: loads are those of this moment, and so is who holds which blocks.
"""

from collections import deque
from collections.abc import Sequence
from random import Random

import numpy as np

from libs.routing.candidates import DecodeCandidates, Draw, Ints, PrefillCandidates, Prompt
from libs.routing.decode_placement import least_kv
from libs.routing.policies import Policy
from libs.simulator.decode_instance import DecodeInstance
from libs.simulator.fetching import Fetching, HeldPrefix
from libs.simulator.job import Job
from libs.simulator.prefill_instance import PrefillInstance
from libs.simulator.shape import ClusterShape


class Placing:
    """First come, first served: whoever does not fit now keeps those behind it waiting."""

    def __init__(
        self,
        shape: ClusterShape,
        policy: Policy,
        prefills: Sequence[PrefillInstance],
        decodes: Sequence[DecodeInstance],
        fetching: Fetching,
        seed: int,
    ) -> None:
        self._shape, self._policy = shape, policy
        self._prefills, self._decodes, self._fetching = prefills, decodes, fetching
        self._chance = Random(seed)
        self._num_placed = 0
        self._waiting: deque[Job] = deque()

    def can_ever_place(self, job: Job) -> bool:
        """Whether it fits instances that have nothing else."""
        return self._prefills[0].can_take(job) and (
            self._decodes[0].num_blocks(job) <= self._decodes[0].shape.num_blocks
        )

    def enter(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def place(self, now: float) -> tuple[Job, PrefillInstance, DecodeInstance] | None:
        """The first of the queue and its place, which is reserved at the decode instance; the caller enqueues
        it at the prefill instance. None: nobody waits, or the first has no place now."""
        if not self._waiting:
            return None
        job = self._waiting[0]
        decodes = [decode for decode in self._decodes if decode.can_reserve(job)]
        limit = self._shape.max_waiting_tokens
        prefills = [prefill for prefill in self._prefills if prefill.num_waiting_tokens < limit]
        if not decodes or not prefills:
            return None
        self._waiting.popleft()
        draw = Draw(self._num_placed, self._chance.random(), self._chance.random())
        decode = decodes[self._choose_decode(job, decodes, draw)]
        decode.reserve(job)
        prefill = prefills[self._policy(self._prompt(job), self._candidates(job, prefills, now), draw)]
        self._num_placed += 1
        return job, prefill, decode

    def _choose_decode(self, job: Job, decodes: Sequence[DecodeInstance], draw: Draw) -> int:
        candidates = DecodeCandidates(
            num_blocks=_ints([decode.capacity_blocks for decode in decodes]),
            num_free_blocks=_ints(
                [decode.capacity_blocks - decode.num_reserved_blocks for decode in decodes]
            ),
            num_sequences=_ints([decode.num_placed for decode in decodes]),
        )
        return least_kv(_ints([decode.num_blocks(job) for decode in decodes]), candidates, draw)

    def _prompt(self, job: Job) -> Prompt:
        held: HeldPrefix = self._fetching.find(job.names)
        on_disk = np.logical_not(np.array(held.is_in_memory, dtype=np.bool_))
        return Prompt(
            num_tokens=job.request.num_input_tokens,
            block_size=self._shape.block_size,
            block_bytes=self._shape.block_bytes,
            num_layers=self._shape.num_layers,
            store_end=np.full(len(held) + 1, len(held), dtype=np.int64),
            disk_before=np.concatenate([_ints([0]), np.cumsum(on_disk, dtype=np.int64)]),
            max_step_tokens=self._shape.prefill.max_step_tokens,
        )

    def _candidates(self, job: Job, prefills: Sequence[PrefillInstance], now: float) -> PrefillCandidates:
        num, cost, fetch = len(prefills), self._shape.prefill.cost, self._shape.store.fetch
        return PrefillCandidates(
            queued_seconds=np.array([prefill.queued_seconds(now) for prefill in prefills]),
            num_prompts=_ints([prefill.num_jobs for prefill in prefills]),
            num_local_blocks=_ints([len(prefill.allocator.find(job.names)) for prefill in prefills]),
            step_seconds=np.full(num, cost.step_seconds),
            token_seconds=np.full(num, cost.token_seconds),
            pair_seconds=np.full(num, cost.pair_seconds),
            fetch_latency_seconds=np.full(num, fetch.latency_seconds),
            fetch_bytes_per_second=np.full(num, fetch.bytes_per_second),
            disk_bytes_per_second=np.full(num, fetch.disk_bytes_per_second),
        )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
