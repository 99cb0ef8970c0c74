"""What a worker does with its instance of the model."""

from enum import Enum


class Role(Enum):
    """`both`: chunks of prompts and tokens of answers in the same steps."""

    PREFILL = "prefill"
    """Runs prompts, and hands their KV to decode workers."""
    DECODE = "decode"
    """Generates, with KV that prefill workers hand over."""
    BOTH = "both"
    """Also runs the prompts of what it generates."""
