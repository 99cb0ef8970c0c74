"""Where a prompt's blocks are, how many of them to fetch, and the fetch itself. Runs the live plan."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from libs.cost.plan_fetch import FetchPlan, plan_fetch
from libs.kv.runs import owner_of, runs_of
from libs.simulator.event_loop import Due
from libs.simulator.job import Job
from libs.simulator.prefill_instance import PrefillInstance
from libs.simulator.shape import ClusterShape
from libs.simulator.store import SimulatedStore


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """The longest prefix that all stores together hold, block by block."""

    stores: list[SimulatedStore]
    nodes: list[int]
    is_in_memory: list[bool]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def num_in_memory(self) -> int:
        """Blocks before the first one that is on disk only."""
        return next((at for at, here in enumerate(self.is_in_memory) if not here), len(self))

    def by_store(self, positions: Iterable[int]) -> dict[SimulatedStore, list[int]]:
        """These positions by the store that holds them."""
        found: dict[SimulatedStore, list[int]] = {}
        for at in positions:
            found.setdefault(self.stores[at], []).append(at)
        return found


class Fetching:
    """All stores, and what every worker does with them."""

    def __init__(self, shape: ClusterShape) -> None:
        self._shape = shape
        self.stores = {
            name: SimulatedStore(name, shape.store, shape.block_bytes) for name in shape.store_names
        }

    def find(self, names: Sequence[bytes]) -> HeldPrefix:
        """What the stores hold of a chain; changes nothing."""
        held = HeldPrefix([], [], [])
        if not self.stores:
            return held
        for run in runs_of(len(names)):
            store = self.stores[owner_of(names[run.start], self._shape.store_names)]
            found = store.find(names[run.start : run.stop])
            held.stores.extend([store] * len(found.nodes))
            held.nodes.extend(found.nodes)
            held.is_in_memory.extend(found.is_in_memory)
            if len(found.nodes) < len(run):
                break
        return held

    def plan(self, job: Job, instance: PrefillInstance, held: HeldPrefix, now: float) -> FetchPlan:
        """How much of it to fetch, as the worker decides it when the prompt is queued."""
        num_sharing = 1 + max((len(store.link) for store in set(held.stores)), default=0)
        own_seconds = instance.job_seconds(job)
        return plan_fetch(
            num_tokens=job.request.num_input_tokens,
            num_here_blocks=job.num_here_blocks,
            num_held_blocks=len(held),
            num_memory_blocks=held.num_in_memory,
            block_size=self._shape.block_size,
            block_bytes=self._shape.block_bytes,
            num_layers=self._shape.num_layers,
            prefill=instance.shape.cost,
            fetch=self._shape.store.fetch,
            num_sharing=num_sharing,
            max_step_tokens=instance.shape.max_step_tokens,
            queued_seconds=max(0.0, instance.queued_seconds(now) - own_seconds),
        )

    def begin(self, job: Job, instance: PrefillInstance, now: float) -> list[Due]:
        """Ask the stores, and fetch what the plan says; the instance hears of the end."""
        for store in self.stores.values():
            store.expire(now)
        held = self.find(job.names)
        dues: list[Due] = []
        for store, positions in held.by_store(range(len(held))).items():
            dues += store.use([held.nodes[at] for at in positions], now)
        plan = self.plan(job, instance, held, now)
        if not plan.num_blocks:
            return dues
        wanted = range(job.num_here_blocks, job.num_here_blocks + plan.num_blocks)
        job.num_memory_blocks = sum(held.is_in_memory[at] for at in wanted)
        job.num_disk_blocks = len(wanted) - job.num_memory_blocks
        job.fetch_began = now + self._shape.store.fetch.latency_seconds
        instance.begin_computing_less(job, len(wanted) * self._shape.block_size)
        for store, positions in held.by_store(wanted).items():
            num_disk = sum(not held.is_in_memory[at] for at in positions)
            dues += self._fetch(job, instance, store, [held.nodes[at] for at in positions], num_disk, now)
        return dues

    def _fetch(
        self,
        job: Job,
        instance: PrefillInstance,
        store: SimulatedStore,
        nodes: list[int],
        num_disk: int,
        now: float,
    ) -> list[Due]:
        """Blocks of one store: its Link carries them all, while its disk reads those not in memory."""
        dues = store.begin_reading(nodes, now)
        ended = partial(self._part_ended, job, instance)
        num_bytes, num_disk_bytes = (count * self._shape.block_bytes for count in (len(nodes), num_disk))
        link_ended = partial(self._link_ended, store, nodes, ended)
        job.num_fetches += 1
        dues.append(Due(job.fetch_began, partial(store.link.begin, num_bytes, link_ended)))
        if num_disk:
            job.num_fetches += 1
            dues.append(Due(job.fetch_began, partial(store.disk.begin, num_disk_bytes, ended)))
        return dues

    def put(self, job: Job, now: float) -> list[Due]:
        """Its computed blocks go to the stores, behind the token's back."""
        dues: list[Due] = []
        names = job.names
        if not self.stores:
            return dues
        for run in runs_of(len(names)):
            store = self.stores[owner_of(names[run.start], self._shape.store_names)]
            parent = names[run.start - 1] if run.start else b""
            dues += store.put(names[run.start : run.stop], parent, now)
        return dues

    def _link_ended(
        self, store: SimulatedStore, nodes: list[int], ended: Callable[[float], list[Due]], now: float
    ) -> list[Due]:
        store.end_reading(nodes)
        return ended(now)

    def _part_ended(self, job: Job, instance: PrefillInstance, now: float) -> list[Due]:
        job.num_fetches -= 1
        if job.num_fetches:
            return []
        job.fetch_ended = now
        return instance.fetch_ended(job, now)
