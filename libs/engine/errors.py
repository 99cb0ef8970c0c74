"""What the engine can refuse, as one tree.

EngineError
├── PromptTooLong      fits this engine's limits never, not even when it is empty
├── InvalidSequence    no tokens, or token ids outside the vocabulary
├── DuplicateSequence  the id is in use
├── UnknownSequence    never reserved, or over already (finished, failed, aborted)
├── WrongState         the operation does not fit what the sequence is doing
├── BadBlocks          KV of the wrong shape, or outside of what is reserved
├── OutOfBlocks        more blocks asked for than are free; ask `can_allocate` first
├── HostLost           a worker that runs modules of this instance is gone (in `hosting.port`)
├── WeightsLost        weights went with a lost host and cannot be read again; the engine ends
├── MoveRefused        a module cannot be moved now; says why
├── NoRoom             too little memory here for another instance's module
├── TooManyCommands    the bounded queue to the engine's thread is full
├── EngineClosed       not started, or closed
└── EngineDied         the engine's thread is gone; its process should be restarted
"""

from collections.abc import Iterable


class EngineError(Exception):
    """Any refusal of the engine."""


class PromptTooLong(EngineError):
    """`num_tokens` tokens and one more exceed `limit` tokens."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens; with room for one new token this engine takes {limit - 1}: "
            "shorten it, or raise max_model_len or the KV memory"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class InvalidSequence(EngineError):
    """A sequence that no model could run."""


class DuplicateSequence(EngineError):
    """Two live sequences cannot share one id."""


class UnknownSequence(EngineError):
    """Nothing is held under this id."""

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"no sequence {sequence_id!r}: it was never reserved here, or it is over already")
        self.sequence_id = sequence_id


class WrongState(EngineError):
    """What was asked does not follow from what the sequence is doing."""


class BadBlocks(EngineError):
    """KV that cannot be what the sequence holds."""


class OutOfBlocks(EngineError):
    """The pool has fewer free blocks than were asked for."""


class WeightsLost(EngineError):
    """A host took layers with it. Nothing can run any more; a new process reads the whole model again."""

    def __init__(self, worker: str, layers: Iterable[int], why: Exception) -> None:
        super().__init__(
            f"the weights of layers {list(layers)} were at the host {worker}, which was lost, and cannot be "
            f"read again: {why}; restart this worker"
        )


class MoveRefused(EngineError):
    """The move does not fit what this instance is or does."""


class NoRoom(EngineError):
    """A hosted module asks for memory that this worker needs itself."""


class TooManyCommands(EngineError):
    """The caller is faster than the engine; wait for earlier answers."""


class EngineClosed(EngineError):
    """The engine is not open."""


class EngineDied(EngineError):
    """The engine's thread ended by an error."""


class NotYet(Exception):
    """Raised by a command that can be run again: whoever runs the core does so after the next step, or after
    the next commands. No error, and no one outside hears of it."""
