"""One Link to a KV store: fetches of prefixes, puts of new blocks."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from libs.engine.errors import EngineError
from libs.kv.checksum import block_checksums, checksum_of_blocks
from libs.kv.layer_groups import layer_groups
from libs.kv.tensors import BlockShape, bytes_of
from libs.transport.frames import (
    Fetch,
    Fetched,
    FetchMissed,
    HeaderUndecodable,
    PutLayer,
    PutNames,
    decode_header,
    encode_header,
)
from libs.transport.link_pool import LinkRequests
from libs.transport.port import Link, LinkError, LinkLost, Received
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.upload_part import UploadPart

WriteBlocks = Callable[[int, int, torch.Tensor], Awaitable[bool]]
"""Layer, first block of the prompt, and blocks from there on. Returns when their memory is no longer needed;
False where nobody wants them any more. Raises EngineError."""

PUT_FRAMES_IN_FLIGHT = 3
"""The next is checksummed while these travel."""

log = structlog.get_logger()


class FetchResult(Enum):
    """How a fetch ended. All but HIT mean: compute it."""

    HIT = "hit"
    UNWANTED = "unwanted"
    """Nobody waits for these blocks any more."""
    MISSED = "missed"
    CORRUPT = "corrupt"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class _Fetching:
    segments: Sequence[range]
    write: WriteBlocks
    result: "asyncio.Future[FetchResult]"
    written: set[int] = field(default_factory=set[int])
    arrived_at: float = 0.0

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.segments))

    def end(self, result: FetchResult) -> None:
        if not self.result.done():
            self.result.set_result(result)


class StoreLink:
    """Asks and puts; `serve` takes the answers in."""

    def __init__(
        self,
        link: Link,
        shape: BlockShape,
        num_layers: int,
        metrics: StoreMetrics,
        *,
        send_timeout_seconds: float,
    ) -> None:
        self._link, self._shape, self._num_layers, self._metrics = link, shape, num_layers, metrics
        self._send_timeout_seconds = send_timeout_seconds
        self._fetching: LinkRequests[_Fetching, LinkError] = LinkRequests()
        self._put_ids = count(1)
        self._putting = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """False once nothing can be asked any more."""
        return self._link.is_open

    async def serve(self) -> str:
        """Take answers in until the Link is lost, whose reason is returned."""
        try:
            async with asyncio.TaskGroup() as tasks:
                return await self._receive(tasks)
        finally:
            for fetching in self._fetching.lose(LinkLost("this Link is over"))[1]:
                fetching.end(FetchResult.FAILED)
            await self._link.close()

    async def close(self) -> None:
        """Idempotent; `serve` returns."""
        await self._link.close()

    async def fetch(
        self, names: Sequence[bytes], segments: Sequence[range], write: WriteBlocks, *, timeout_seconds: float
    ) -> tuple[FetchResult, float]:
        """Have all layers of these blocks written; `segments` are their positions in the prompt, in order.

        Returns the result and the seconds until the last layer arrived. Unless it is a HIT, any part may have
        been written, and nothing more is written after this returned.
        """
        started = time.monotonic()
        fetching = _Fetching(segments, write, asyncio.get_running_loop().create_future())
        fetch_id = 0
        try:
            fetch_id = self._fetching.add(fetching)
            header = encode_header(Fetch(fetch_id=fetch_id, num_blocks=len(names)))
            async with asyncio.timeout(timeout_seconds):
                await self._link.send(header, _joined(names), timeout_seconds=timeout_seconds)
                result = await fetching.result
                return result, fetching.arrived_at - started
        except (TimeoutError, LinkError) as error:
            log.info("prefix_not_fetched", peer=self._link.peer, reason=str(error) or "it took too long")
            return FetchResult.FAILED, time.monotonic() - started
        finally:
            fetching.end(FetchResult.FAILED)
            self._fetching.take(fetch_id)

    async def put(self, part: UploadPart) -> None:
        """Send blocks, after those that were put before. Raises LinkError."""
        async with self._putting:
            put_id = next(self._put_ids)
            names = PutNames(
                put_id=put_id,
                num_blocks=len(part.names),
                num_layers=self._num_layers,
                layer_bytes=self._shape.num_bytes,
                parent=part.parent,
                request_id=part.request_id,
                num_output_tokens=part.num_output_tokens,
            )
            await self._send(encode_header(names), _joined(part.names))
            groups = iter(layer_groups(self._num_layers, self._shape.num_bytes * len(part.names)))
            senders = (self._put_layers(part, put_id, groups) for _ in range(PUT_FRAMES_IN_FLIGHT))
            # All are waited for: a frame's memory is read until it was taken.
            for result in await asyncio.gather(*senders, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

    async def _put_layers(self, part: UploadPart, put_id: int, groups: Iterator[range]) -> None:
        """Send what comes next of the groups, until nothing is left or the Link is lost."""
        for layers in groups:
            body = bytes_of(part.take_layers(layers))
            checksum = checksum_of_blocks(block_checksums(body, len(layers) * len(part.names)))
            header = PutLayer(put_id=put_id, layer=layers.start, num_layers=len(layers), checksum=checksum)
            await self._send(encode_header(header), body)
            self._metrics.transfer_bytes.labels("put").inc(body.size)

    async def _send(self, header: bytes, body: NDArray[np.uint8]) -> None:
        await self._link.send(header, body, timeout_seconds=self._send_timeout_seconds)

    async def _receive(self, tasks: asyncio.TaskGroup) -> str:
        while True:
            try:
                frame = await self._link.receive()
            except LinkError as lost:
                return str(lost)
            is_kept = False
            try:
                is_kept = self._handle(frame, tasks)
            except HeaderUndecodable as error:
                return str(error)
            finally:
                if not is_kept:
                    frame.release()

    def _handle(self, frame: Received, tasks: asyncio.TaskGroup) -> bool:
        """True when the frame's memory is still needed."""
        header = decode_header(frame.header)
        if not isinstance(header, Fetched | FetchMissed):
            raise HeaderUndecodable(f"a KV store sent {type(header).__name__}")
        fetching = self._fetching.get(header.fetch_id)
        if fetching is None or fetching.result.done():
            return False  # Given up already.
        if isinstance(header, FetchMissed):
            fetching.end(FetchResult.MISSED)
            return False
        fetching.arrived_at = time.monotonic()
        self._metrics.transfer_bytes.labels("fetched").inc(frame.body.size)
        if not self._is_right(header, frame, fetching):
            log.warning("fetched_kv_corrupt", peer=self._link.peer, layer=header.layer)
            fetching.end(FetchResult.CORRUPT)
            return False
        tasks.create_task(self._write(header, frame, fetching))
        return True

    def _is_right(self, header: Fetched, frame: Received, fetching: _Fetching) -> bool:
        is_layer = header.layer >= 0 and 0 < header.num_layers <= self._num_layers - header.layer
        num_parts = header.num_layers * header.num_blocks
        if not is_layer or header.num_blocks != fetching.num_blocks:
            return False
        if frame.body.size != num_parts * self._shape.num_bytes:
            return False
        return checksum_of_blocks(block_checksums(frame.body, num_parts)) == header.checksum

    async def _write(self, header: Fetched, frame: Received, fetching: _Fetching) -> None:
        layers = range(header.layer, header.layer + header.num_layers)
        try:
            blocks = self._shape.layers_of(frame.body, header.num_layers, fetching.num_blocks)
            writes = (
                self._write_segment(fetching, layer, segment, blocks[layer - header.layer, first : first + n])
                for layer in layers
                for segment, first, n in _offsets(fetching.segments)
            )
            # All are waited for, whatever becomes of one: the frame's memory is read until then.
            results = await asyncio.gather(*writes, return_exceptions=True)
            self._note(fetching, layers, results)
        finally:
            frame.release()

    @staticmethod
    async def _write_segment(fetching: _Fetching, layer: int, segment: range, blocks: torch.Tensor) -> bool:
        # Looked at just before: who asked may use the same blocks anew once the fetch has ended.
        return not fetching.result.done() and await fetching.write(layer, segment.start, blocks)

    def _note(self, fetching: _Fetching, layers: range, results: Sequence[bool | BaseException]) -> None:
        for result in results:
            if isinstance(result, EngineError):
                log.warning("fetched_kv_not_written", reason=str(result))
                fetching.end(FetchResult.FAILED)
            elif isinstance(result, BaseException):
                raise result
        if not all(result is True for result in results):
            fetching.end(FetchResult.UNWANTED)
        fetching.written.update(layers)
        if len(fetching.written) == self._num_layers:
            fetching.end(FetchResult.HIT)


def _offsets(segments: Sequence[range]) -> list[tuple[range, int, int]]:
    """Each segment with the place and the number of its blocks among all that travel."""
    offsets: list[tuple[range, int, int]] = []
    first = 0
    for segment in segments:
        offsets.append((segment, first, len(segment)))
        first += len(segment)
    return offsets


def _joined(names: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(names), dtype=np.uint8)
