"""What is known of each worker, as columns with one row each: a choice reads whole columns at once. Pure."""

import numpy as np
from numpy.typing import NDArray

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.cost.fetch import DEFAULT_FETCH_COST
from libs.cost.load import WorkerLoad
from libs.cost.prefill import DEFAULT_PREFILL_COST
from libs.routing.candidates import Floats, Ints

Bools = NDArray[np.bool_]


class Numbers:
    """Small numbers for texts that many rows share (models, fingerprints), so that columns can hold them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, text: str) -> int:
        """The number of this text, a new one if need be."""
        return self._numbers.setdefault(text, len(self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)

    def known(self, text: str) -> int:
        """The number of this text; -1: no row ever had it."""
        return self._numbers.get(text, -1)


class Instances:
    """Workers by row. A row that is free is of no kind, so that no choice sees it."""

    def __init__(self, capacity: int = 16) -> None:
        self.rows: dict[str, int] = {}
        """By incarnation."""
        self.presences: list[Presence | None] = [None] * capacity
        self.models, self.fingerprints = Numbers(), Numbers()
        self._free = list(range(capacity - 1, -1, -1))
        # From presence
        self.is_prefill: Bools = np.zeros(capacity, np.bool_)
        self.is_decode: Bools = np.zeros(capacity, np.bool_)
        self.is_ready: Bools = np.zeros(capacity, np.bool_)
        self.runs_prompts: Bools = np.zeros(capacity, np.bool_)
        self.model: Ints = np.zeros(capacity, np.int64)
        self.fingerprint: Ints = np.zeros(capacity, np.int64)
        self.max_model_len: Ints = np.zeros(capacity, np.int64)
        self.num_seats: Ints = np.zeros(capacity, np.int64)
        # From load reports
        self.heard_at: Floats = np.full(capacity, -np.inf)
        self.num_running: Ints = np.zeros(capacity, np.int64)
        self.num_beginning: Ints = np.zeros(capacity, np.int64)
        self.num_waiting_tokens: Ints = np.zeros(capacity, np.int64)
        self.block_size: Ints = np.ones(capacity, np.int64)
        self.num_blocks: Ints = np.zeros(capacity, np.int64)
        self.num_used_blocks: Ints = np.zeros(capacity, np.int64)
        self.mean_output_tokens: Floats = np.zeros(capacity)
        self.queued_seconds: Floats = np.zeros(capacity)
        self.step_seconds: Floats = np.zeros(capacity)
        self.token_seconds: Floats = np.zeros(capacity)
        self.pair_seconds: Floats = np.zeros(capacity)
        self.fetch_latency_seconds: Floats = np.zeros(capacity)
        self.fetch_bytes_per_second: Floats = np.ones(capacity)
        self.disk_bytes_per_second: Floats = np.zeros(capacity)
        # Placed here and not counted in a report yet
        self.num_pending: Ints = np.zeros(capacity, np.int64)
        self.num_pending_tokens: Ints = np.zeros(capacity, np.int64)
        self.num_pending_blocks: Ints = np.zeros(capacity, np.int64)
        self.pending_seconds: Floats = np.zeros(capacity)

    def add(self, presence: Presence) -> int:
        """A row for a new worker; nothing is known of its load."""
        if not self._free:
            self._grow()
        row = self.rows[presence.incarnation] = self._free.pop()
        for column in self._columns().values():
            column[row] = 0
        self.heard_at[row], self.block_size[row] = -np.inf, 1
        self.fetch_bytes_per_second[row] = DEFAULT_FETCH_COST.bytes_per_second
        self.describe(row, presence)
        return row

    def describe(self, row: int, presence: Presence) -> None:
        """What it says of itself."""
        self.presences[row] = presence
        self.is_prefill[row] = presence.kind is ServiceKind.PREFILL_WORKER
        self.is_decode[row] = presence.kind is ServiceKind.DECODE_WORKER
        self.is_ready[row] = presence.state is ServiceState.READY
        self.runs_prompts[row] = presence.runs_prompts
        self.model[row] = self.models.of(presence.model)
        self.fingerprint[row] = self.fingerprints.of(presence.model_fingerprint)
        self.max_model_len[row] = presence.max_model_len
        self.num_seats[row] = presence.num_seats

    def remove(self, incarnation: str) -> None:
        """It is gone."""
        row = self.rows.pop(incarnation)
        self.presences[row] = None
        self.is_prefill[row] = self.is_decode[row] = self.is_ready[row] = False
        self.heard_at[row] = -np.inf
        self._free.append(row)

    def hear(self, row: int, load: WorkerLoad, now: float) -> None:
        """What it reports."""
        prefill = load.prefill_cost or DEFAULT_PREFILL_COST
        fetch = load.fetch_cost or DEFAULT_FETCH_COST
        self.heard_at[row] = now
        self.num_running[row] = load.num_running
        self.num_beginning[row] = load.num_waiting + load.num_reserved
        self.num_waiting_tokens[row] = load.num_waiting_tokens
        self.block_size[row] = max(1, load.block_size)
        self.num_blocks[row], self.num_used_blocks[row] = load.num_blocks, load.num_used_blocks
        self.mean_output_tokens[row] = load.mean_output_tokens
        # A worker that does not tell seconds is judged by its tokens.
        self.queued_seconds[row] = max(load.queued_seconds, prefill.token_seconds * load.num_waiting_tokens)
        self.step_seconds[row], self.token_seconds[row] = prefill.step_seconds, prefill.token_seconds
        self.pair_seconds[row] = prefill.pair_seconds
        self.fetch_latency_seconds[row] = fetch.latency_seconds
        self.fetch_bytes_per_second[row] = max(fetch.bytes_per_second, 1.0)
        self.disk_bytes_per_second[row] = fetch.disk_bytes_per_second

    def presence(self, row: int) -> Presence:
        """Of a row in use."""
        presence = self.presences[row]
        if presence is None:
            raise LookupError(f"row {row} is free; choose among rows of a kind")
        return presence

    def names(self, rows: Ints) -> list[str]:
        """What people call these workers: stable over restarts."""
        return [self.presence(int(row)).name for row in rows]

    def _columns(self) -> dict[str, NDArray[np.generic]]:
        return {name: column for name, column in vars(self).items() if isinstance(column, np.ndarray)}

    def _grow(self) -> None:
        capacity = len(self.presences)
        for name, column in self._columns().items():
            # What free rows hold does not matter, but that computing with it raises nothing does.
            setattr(self, name, np.concatenate([column, np.ones_like(column)]))
        for of_kind in (self.is_prefill, self.is_decode, self.is_ready):
            of_kind[capacity:] = False
        self.presences += [None] * capacity
        self._free += range(2 * capacity - 1, capacity - 1, -1)
