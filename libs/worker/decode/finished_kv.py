"""Blocks of finished sequences on their way to the KV stores, so that a chat's next turn finds them anywhere.

One sequence at a time, piece by piece: little memory is held, and the engine is kept from its steps only for
the copy of one piece.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from prometheus_client import Counter

from libs.engine.engine import Engine
from libs.engine.errors import EngineError
from libs.kv.names import block_names
from libs.request.generation import num_tokens
from libs.worker.decode.sequences import HeldSequence
from libs.worker.stores.stores import PromptAsked, Stores
from libs.worker.stores.upload_part import UploadPart

MAX_WAITING = 256
"""Finished sequences that wait; their blocks lie in the pool as long as nobody needs the room."""
PIECE_BYTES = 4 << 20
"""Copied out of the pool between two steps: about a millisecond."""

log = structlog.get_logger()


class FinishedKvUploads:
    """`finished` takes sequences in at once, `run` sees to them."""

    def __init__(
        self, engine: Engine, stores: Stores, not_kept: Counter, *, fingerprint: str, block_size: int
    ) -> None:
        self._engine, self._stores, self._not_kept = engine, stores, not_kept
        self._fingerprint, self._block_size = fingerprint, block_size
        self._waiting: deque[HeldSequence] = deque(maxlen=MAX_WAITING)
        self._came = asyncio.Event()

    def finished(self, held: HeldSequence) -> None:
        """It came to its own end. Of too many, the oldest is forgotten: its blocks go first anyway."""
        if self._stores.are_there and self._num_new_blocks(held):
            if len(self._waiting) == MAX_WAITING:
                self._not_kept.inc()
            self._waiting.append(held)
            self._came.set()

    async def run(self) -> NoReturn:
        """For ever."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                try:
                    await self._keep(self._waiting.popleft())
                except EngineError as error:
                    log.info("finished_blocks_not_kept", reason=str(error))

    def _num_new_blocks(self, held: HeldSequence) -> int:
        """Full blocks that nobody else puts: a prefill worker puts those of its prompts."""
        num_full = (num_tokens(held.generation) + len(held.output_ids) - 1) // self._block_size
        return num_full - (num_tokens(held.generation) // self._block_size if held.prefill else 0)

    async def _keep(self, held: HeldSequence) -> None:
        """Put what the stores lack of it, parents first. Raises EngineError."""
        names = block_names(
            _computed_ids(held), self._block_size, self._fingerprint, held.generation.cache_salt
        )
        found = await self._stores.find(names, PromptAsked(held.request_id), lease=False)
        for run in found.runs:
            await self._put(held, names, run.missing, run.store)

    async def _put(self, held: HeldSequence, names: Sequence[bytes], blocks: range, store: str) -> None:
        """All of these that are still in the pool, until the store takes no more."""
        step = max(1, PIECE_BYTES // self._stores.block_bytes)
        for first in range(blocks.start, blocks.stop, step):
            wanted = names[first : min(first + step, blocks.stop)]
            read = await self._engine.read_blocks(wanted)
            if not len(read):
                return
            is_last = first + len(read) == len(names)
            part = UploadPart(
                names=wanted[: len(read)],
                parent=names[first - 1] if first else b"",
                take_layers=_LayersOf(read),
                request_id=held.request_id,
                num_output_tokens=len(held.output_ids) if is_last else 0,
            )
            if not await self._stores.put(store, part) or len(read) < len(wanted):
                return


class _LayersOf:
    """Layers of blocks as they lie in the pool, `[n, num_layers, ...]`."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks

    def __call__(self, layers: range) -> torch.Tensor:
        return self._blocks[:, layers.start : layers.stop].transpose(0, 1).contiguous()


def _computed_ids(held: HeldSequence) -> NDArray[np.int32]:
    """All its tokens but the last, whose KV nobody needed."""
    before = np.frombuffer(held.generation.token_ids, dtype="<i4")
    return np.concatenate([before, np.array(held.output_ids[:-1], dtype=np.int32)])
