"""One prefill instance of the simulated mesh: the live block allocator, and chunks, first come first.

A step takes up to `max_step_tokens` from the prompts whose KV is there. Only where all wait for a fetch, the
first of them is run layer by layer as they arrive.
"""

from collections import deque
from collections.abc import Callable

from libs.cost.prefill import num_pairs, prefill_seconds, work_seconds
from libs.engine.memory.allocator import BlockAllocator
from libs.simulator.event_loop import Due
from libs.simulator.job import Job
from libs.simulator.pace import Pace
from libs.simulator.shape import ClusterShape

OnJob = Callable[[Job, float], list[Due]]


class PrefillInstance:
    """`begin_fetch` is called when a prompt got its blocks, `prefilled` at its first token, `stepped` after
    each step."""

    def __init__(
        self,
        name: str,
        cluster: ClusterShape,
        begin_fetch: OnJob,
        prefilled: OnJob,
        stepped: Callable[[float], list[Due]],
    ) -> None:
        self.name, self.shape = name, cluster.prefill
        self.allocator = BlockAllocator(cluster.prefill.num_blocks)
        self.busy_seconds = 0.0
        self.num_computed_tokens = 0
        self.pace = Pace()
        """Of the steps that begin from now on."""
        self.num_jobs = 0
        """Placed here and not through."""
        self.num_waiting_tokens = 0
        self._block_size, self._num_layers = cluster.block_size, cluster.num_layers
        self._begin_fetch, self._prefilled, self._stepped = begin_fetch, prefilled, stepped
        self._without_blocks: deque[Job] = deque()
        self._queue: dict[Job, None] = {}
        self._queued_seconds = 0.0
        self._step: list[tuple[Job, int]] = []
        self._step_began = self._step_seconds = 0.0
        self._awaited: Job | None = None

    def can_take(self, job: Job) -> bool:
        """Whether its prompt fits an empty pool."""
        return self._num_blocks(job) <= self.shape.num_blocks

    def queued_seconds(self, now: float) -> float:
        """Work placed here, the running step's rest included."""
        done = min(self._step_seconds, now - self._step_began) if self._step else 0.0
        return max(0.0, self._queued_seconds * self.pace.slowdown - done)

    def enqueue(self, job: Job, now: float) -> list[Due]:
        """One more prompt."""
        self.num_jobs += 1
        job.num_left = job.request.num_input_tokens
        self._account(job, 1)
        self._without_blocks.append(job)
        return self._go_on(now)

    def fetch_ended(self, job: Job, now: float) -> list[Due]:
        """All that is fetched for this job is here."""
        if self._awaited is not job:
            return self._go_on(now)
        self._awaited = None
        return [self._run_layer_by_layer(job, now)]

    def begin_computing_less(self, job: Job, num_found: int) -> None:
        """So many tokens of its prompt need not be computed."""
        self._account(job, -1)
        job.num_context += num_found
        job.num_left -= num_found
        self._account(job, 1)

    def job_seconds(self, job: Job) -> float:
        """What is left to compute of it."""
        return prefill_seconds(
            self.shape.cost, job.num_left, job.num_context, max_step_tokens=self.shape.max_step_tokens
        )

    def _account(self, job: Job, sign: int) -> None:
        self.num_waiting_tokens += sign * job.num_left
        self._queued_seconds += sign * self.job_seconds(job)

    def _num_blocks(self, job: Job) -> int:
        return -(-job.request.num_input_tokens // self._block_size)

    def _go_on(self, now: float) -> list[Due]:
        dues: list[Due] = []
        while self._without_blocks and self._take_blocks(self._without_blocks[0]):
            job = self._without_blocks.popleft()
            self._queue[job] = None
            dues += self._begin_fetch(job, now)
        if not self._step:
            dues += self._begin_step(now)
        return dues

    def _take_blocks(self, job: Job) -> bool:
        num_usable = (job.request.num_input_tokens - 1) // self._block_size
        found = self.allocator.find(job.names[:num_usable])
        num_wanted = self._num_blocks(job) - len(found)
        if not self.allocator.can_allocate(num_wanted + self.allocator.num_cached(found)):
            return False
        self.allocator.acquire(found)
        job.blocks = found + self.allocator.allocate(num_wanted)
        job.num_here_blocks = len(found)
        self.begin_computing_less(job, len(found) * self._block_size)
        return True

    def _begin_step(self, now: float) -> list[Due]:
        step: list[tuple[Job, int]] = []
        room = self.shape.max_step_tokens
        for job in self._queue:
            if not room:
                break
            if not job.num_fetches:
                step.append((job, min(room, job.num_left)))
                room -= step[-1][1]
        if step:
            self._awaited = None  # what is ready does not wait for what is not
            return [self._run(step, now)]
        if self._awaited is None:
            self._awaited, self._step_began = next(iter(self._queue), None), now
        return []

    def _run(self, step: list[tuple[Job, int]], now: float) -> Due:
        self._step, self._step_began = step, now
        self._step_seconds = self._compute_seconds(step)
        return Due(now + self._step_seconds, self._step_ends)

    def _run_layer_by_layer(self, job: Job, now: float) -> Due:
        """Its fetch has just ended. The step began when the instance became free for it, and ends when the
        layers that arrived one after the other are through."""
        began = self._step_began
        step = [(job, min(job.num_left, self.shape.max_step_tokens))]
        computing = self._compute_seconds(step)
        first_arrived = job.fetch_began + (job.fetch_ended - job.fetch_began) / self._num_layers
        ends = max(max(began, first_arrived) + computing, now + computing / self._num_layers)
        self._step, self._step_began, self._step_seconds = step, now, ends - now
        return Due(ends, self._step_ends)

    def _compute_seconds(self, step: list[tuple[Job, int]]) -> float:
        pairs = sum(num_pairs(count, job.num_context) for job, count in step)
        seconds = work_seconds(self.shape.cost, 1, sum(count for _, count in step), pairs)
        self.busy_seconds += seconds
        self.num_computed_tokens += sum(count for _, count in step)
        return self.pace.wall_seconds(seconds)

    def _step_ends(self, now: float) -> list[Due]:
        step, self._step = self._step, []
        dues: list[Due] = []
        for job, count in step:
            self.begin_computing_less(job, count)
            if not job.num_left:
                dues += self._finish(job, now)
        dues += self._go_on(now)
        return dues + self._stepped(now)

    def _finish(self, job: Job, now: float) -> list[Due]:
        del self._queue[job]
        self.num_jobs -= 1
        for block, name in zip(job.blocks, job.names, strict=False):
            self.allocator.name(block, name)
        self.allocator.release(job.blocks)
        job.blocks = []
        job.prefilled_at = now
        return self._prefilled(job, now)
