"""What the stores said they hold of one prompt. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.bus.messages.store import PrefixHeld
from libs.kv.runs import joined_runs


@dataclass(frozen=True, slots=True)
class RunLookup:
    """One run: its blocks, the store (by name) that keeps it, and how many of its first blocks that holds.
    `num_held` None: it did not say."""

    blocks: range
    store: str
    num_held: int | None = None
    num_in_memory: int = 0

    @property
    def missing(self) -> range:
        """Blocks that the store lacks for certain."""
        return self.blocks[len(self.blocks) if self.num_held is None else self.num_held :]


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """All runs of a prompt, in order. They are kept for `lease_seconds` from `at_seconds` (monotonic) on."""

    runs: tuple[RunLookup, ...] = ()
    at_seconds: float = 0.0
    lease_seconds: float = 0.0

    @property
    def num_held(self) -> int:
        """The first blocks of the prompt, as far as they are held without a gap."""
        return sum(num for num, _ in self._held_runs())

    @property
    def num_in_memory(self) -> int:
        """So many of those need no disk."""
        return sum(num for _, num in self._held_runs())

    @property
    def is_answered(self) -> bool:
        """Whether any store said anything."""
        return any(run.num_held is not None for run in self.runs)

    @property
    def missing(self) -> list[range]:
        """Blocks that stores lack for certain, in order."""
        return joined_runs([run.missing for run in self.runs if run.missing])

    def is_stale(self, now_seconds: float) -> bool:
        """Whether blocks may have gone since."""
        return now_seconds >= self.at_seconds + self.lease_seconds

    def num_on_disk(self, blocks: range) -> int:
        """How many of these, all of them held, come from a disk."""
        num = 0
        for run in self.runs:
            first = run.blocks.start + run.num_in_memory
            num += len(_overlap(range(first, run.blocks.stop), blocks))
        return num

    def by_store(self, blocks: range) -> dict[str, list[range]]:
        """These blocks by the store that keeps them, in order, neighbours joined."""
        parts: dict[str, list[range]] = {}
        for run in self.runs:
            if part := _overlap(run.blocks, blocks):
                parts.setdefault(run.store, []).append(part)
        return {store: joined_runs(ranges) for store, ranges in parts.items()}

    def _held_runs(self) -> Iterable[tuple[int, int]]:
        for run in self.runs:
            num_held = run.num_held or 0
            yield num_held, min(run.num_in_memory, num_held)
            if num_held < len(run.blocks):
                return


def run_lookups(store: str, runs: Sequence[range], answer: PrefixHeld | None) -> list[RunLookup]:
    """One store's answer about its runs; what is missing or makes no sense is taken as said by nobody."""
    if answer is None or not len(answer.num_blocks) == len(answer.num_in_memory) == len(runs):
        return [RunLookup(run, store) for run in runs]
    found: list[RunLookup] = []
    for run, num_held, num_in_memory in zip(runs, answer.num_blocks, answer.num_in_memory, strict=True):
        is_possible = 0 <= num_in_memory <= num_held <= len(run)
        found.append(RunLookup(run, store, num_held, num_in_memory) if is_possible else RunLookup(run, store))
    return found


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), max(one.start, other.start, min(one.stop, other.stop)))
