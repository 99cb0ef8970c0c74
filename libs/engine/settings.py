"""Sizes of one engine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Checked when made; ValueError names the field."""

    max_model_len: int
    """Tokens of prompt and output together that one sequence may have."""
    num_blocks: int | None = None
    """None: as many as `kv_memory_bytes` holds."""
    kv_memory_bytes: int = 1 << 30
    block_size: int = 16
    """Tokens per block."""
    max_num_seqs: int = 256
    """Sequences in one step."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step; longer prompts run in chunks."""
    hand_over_bytes: int = 256 << 20
    """KV handed out and not yet released, at most; prompts that are handed over wait beyond it."""
    num_threads: int | None = None
    """CPU threads inside an operation; None leaves torch's choice.

    OpenMP keeps a team per calling thread and lets teams sleep at every barrier, at half the speed, once
    all teams together outnumber the cores. So load the model on a thread that ends, or with one thread.
    """
    prefix_cache: bool = True
    """Whether blocks stay findable by name after their sequence is over."""
    device_share: float = 1.0
    """Busy seconds per second that own steps and other instances' modules may have together; below 1 it
    behaves like a slower device."""
    hosting_timeout_seconds: float = 10.0
    """How long a step waits for a worker that runs modules of this instance before that counts as lost."""

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "hand_over_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks is {self.num_blocks}; it must be at least 1")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}; it must be at least 1")

        if not 0 < self.device_share <= 1:
            raise ValueError(f"device_share is {self.device_share}; it must be above 0 and at most 1")
        if not self.hosting_timeout_seconds > 0:
            raise ValueError(f"hosting_timeout_seconds is {self.hosting_timeout_seconds}; it must be above 0")

    @property
    def num_step_seqs(self) -> int:
        """Sequences that one step can have: each brings at least one token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def pool_blocks(settings: EngineSettings, block_bytes: int) -> int:
    """Blocks of the pool. Raises ValueError where the memory holds none."""
    if settings.num_blocks is not None:
        return settings.num_blocks
    num_blocks = settings.kv_memory_bytes // block_bytes
    if not num_blocks:
        raise ValueError(
            f"kv_memory_bytes is {settings.kv_memory_bytes}, below one block of {block_bytes} bytes; raise it"
        )
    return num_blocks
