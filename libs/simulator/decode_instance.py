"""One decode instance of the simulated mesh: sequences that take their steps together."""

from collections.abc import Callable
from functools import partial

from libs.simulator.event_loop import Due
from libs.simulator.job import Job
from libs.simulator.pace import Pace
from libs.simulator.shape import DecodeShape
from libs.simulator.shared_progress import SharedProgress


class DecodeInstance:
    """Holds room for every sequence from its placement to its end. `finished` is called at that end."""

    def __init__(
        self, name: str, shape: DecodeShape, block_size: int, finished: Callable[[Job, float], list[Due]]
    ) -> None:
        self.name, self.shape = name, shape
        self.capacity_blocks = shape.num_blocks
        """Of its pool now: what modules that are elsewhere leave it."""
        self._pace = Pace()
        self.num_reserved_blocks = 0
        self.num_placed = 0
        """Sequences that it keeps room for."""
        self._block_size, self._finished = block_size, finished
        self._sequences: SharedProgress[Job] = SharedProgress()
        self._num_changes = 0
        self._num_context_at_start = 0.0
        """Tokens of context of all sequences, had each been there from the first step on."""

    @property
    def num_running(self) -> int:
        """Sequences that generate."""
        return len(self._sequences)

    def num_blocks(self, job: Job) -> int:
        """That it takes in the end."""
        return -(-(job.request.num_input_tokens + job.request.num_output_tokens) // self._block_size)

    def can_reserve(self, job: Job) -> bool:
        """Whether there is room for it now."""
        return self.num_reserved_blocks + self.num_blocks(job) <= self.capacity_blocks

    def reserve(self, job: Job) -> None:
        """Keep room for it."""
        self.num_reserved_blocks += self.num_blocks(job)
        self.num_placed += 1

    def begin(self, job: Job, now: float) -> list[Due]:
        """Its KV and its first token are here."""
        self._sequences.advance(now)
        self._sequences.join(job, job.request.num_output_tokens - 1)
        self._num_context_at_start += job.request.num_input_tokens - self._sequences.progress
        return self._go_on()

    def set_pace(self, pace: Pace, now: float) -> list[Due]:
        """Another pace from now on."""
        if pace == self._pace:
            return []
        self._sequences.advance(now)
        self._pace = pace
        return self._go_on()

    @property
    def busy_share(self) -> float:
        """Busy seconds per second that its steps take of all devices together."""
        busy = self._busy_seconds()
        return busy / self._pace.wall_seconds(busy) if self.num_running else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences."""
        return self.num_running / self._pace.wall_seconds(self._busy_seconds()) if self.num_running else 0.0

    def _go_on(self) -> list[Due]:
        """Sequences came or went: another speed from now on."""
        self._num_changes += 1
        if not self.num_running:
            return []
        self._sequences.set_speed(1.0 / self._pace.wall_seconds(self._busy_seconds()))
        return [Due(self._sequences.next_end(), partial(self._ends, self._num_changes))]

    def _busy_seconds(self) -> float:
        cost, num_running = self.shape.cost, self.num_running
        num_context = self._num_context_at_start + num_running * self._sequences.progress
        return cost.step_seconds + cost.sequence_seconds * num_running + cost.token_seconds * num_context

    def _ends(self, num_changes: int, now: float) -> list[Due]:
        if num_changes != self._num_changes:
            return []  # another speed since: it ends at another time
        self._sequences.advance(now)
        ended = self._sequences.take_ended()
        dues: list[Due] = []
        for job in ended:
            # It joined with `progress - (output - 1)`, and leaves with what it has by now.
            joined_at = self._sequences.progress - (job.request.num_output_tokens - 1)
            self._num_context_at_start -= job.request.num_input_tokens - joined_at
            self.num_reserved_blocks -= self.num_blocks(job)
            self.num_placed -= 1
            job.finished_at = now
        dues += self._go_on()
        for job in ended:
            dues += self._finished(job, now)
        return dues
