"""One request on its way through the simulated mesh."""

from dataclasses import dataclass, field

from libs.simulator.trace import TraceRequest


@dataclass(slots=True, eq=False)
class Job:
    """What is known of a request so far. Times are seconds on the virtual clock; NaN: not yet."""

    number: int
    request: TraceRequest
    names: list[bytes]
    """Of the prompt's full blocks."""
    prefill: str = ""
    decode: str = ""
    blocks: list[int] = field(default_factory=list[int])
    """Held in the prefill instance's pool."""
    num_here_blocks: int = 0
    num_memory_blocks: int = 0
    """Fetched from a store's memory."""
    num_disk_blocks: int = 0
    """Fetched from a store's disk."""
    num_context: int = 0
    """Tokens of the prompt whose KV is there or on its way."""
    num_left: int = 0
    """Tokens of the prompt that are yet to be computed."""
    num_fetches: int = 0
    """Transfers still under way for it."""
    fetch_began: float = float("nan")
    fetch_ended: float = float("nan")
    placed_at: float = float("nan")
    prefilled_at: float = float("nan")
    finished_at: float = float("nan")

    @property
    def ttft_seconds(self) -> float:
        """From its arrival to its first token, which comes with the hand-over."""
        return self.prefilled_at - self.request.arrival_seconds
