"""One Link to a KV store: fetches of prefixes, puts of new blocks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from libs.transport.port import Link, LinkError, Received
from services.prefill_worker.metrics import PrefillMetrics
from services.prefill_worker.store_put import StorePut

WriteLayer = Callable[[int, torch.Tensor], Awaitable[bool]]
"""Layer and its blocks. Returns when their memory is no longer needed; False where nobody wants them any
more. Raises EngineError."""

log = structlog.get_logger()


class FetchResult(Enum):
    """How a fetch ended. All but HIT mean: compute it."""

    HIT = "hit"
    MISSED = "missed"
    CORRUPT = "corrupt"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class _Fetching:
    num_blocks: int
    write: WriteLayer
    result: "asyncio.Future[FetchResult]"
    written: set[int] = field(default_factory=set[int])

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
        metrics: PrefillMetrics,
        *,
        send_timeout_seconds: float,
    ) -> None:
        self._link, self._shape, self._num_layers, self._metrics = link, shape, num_layers, metrics
        self._send_timeout_seconds = send_timeout_seconds
        self._fetching: dict[int, _Fetching] = {}
        self._ids = count(1)

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
            for fetching in self._fetching.values():
                fetching.end(FetchResult.FAILED)
            await self._link.close()

    async def close(self) -> None:
        """Idempotent; `serve` returns."""
        await self._link.close()

    async def fetch(
        self, names: Sequence[bytes], write: WriteLayer, *, timeout_seconds: float
    ) -> FetchResult:
        """Have all layers of these blocks written. Unless it is a HIT, any part may have been written."""
        fetch_id = next(self._ids)
        fetching = _Fetching(len(names), write, asyncio.get_running_loop().create_future())
        self._fetching[fetch_id] = fetching
        header = encode_header(Fetch(fetch_id=fetch_id, num_blocks=len(names)))
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._link.send(header, _joined(names), timeout_seconds=timeout_seconds)
                return await fetching.result
        except (TimeoutError, LinkError) as error:
            log.info("prefix_not_fetched", reason=str(error) or "it took too long")
            return FetchResult.FAILED
        finally:
            fetching.end(FetchResult.FAILED)
            del self._fetching[fetch_id]

    async def put(self, put: StorePut) -> None:
        """Send a complete put. Raises LinkError."""
        put_id = next(self._ids)
        names = PutNames(
            put_id=put_id,
            num_blocks=len(put.names),
            num_layers=self._num_layers,
            layer_bytes=self._shape.num_bytes,
        )
        await self._link.send(
            encode_header(names), _joined(put.names), timeout_seconds=self._send_timeout_seconds
        )
        for layers in layer_groups(self._num_layers, self._shape.num_bytes * len(put.names)):
            body = bytes_of(put.take_layers(layers))
            checksum = checksum_of_blocks(block_checksums(body, len(layers) * len(put.names)))
            header = PutLayer(put_id=put_id, layer=layers.start, num_layers=len(layers), checksum=checksum)
            await self._link.send(encode_header(header), body, timeout_seconds=self._send_timeout_seconds)
            self._metrics.transfer_bytes.labels("put").inc(body.size)

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
            if not fetching.result.done():
                blocks = self._shape.layers_of(frame.body, header.num_layers, fetching.num_blocks)
                writes = (fetching.write(layer, blocks[layer - header.layer]) for layer in layers)
                # All are waited for, whatever becomes of one: the frame's memory is read until then.
                results = await asyncio.gather(*writes, return_exceptions=True)
                self._note(fetching, layers, results)
        finally:
            frame.release()

    def _note(self, fetching: _Fetching, layers: range, results: Sequence[bool | BaseException]) -> None:
        for result in results:
            if isinstance(result, EngineError):
                log.warning("fetched_kv_not_written", reason=str(result))
            elif isinstance(result, BaseException):
                raise result
        if not all(result is True for result in results):
            fetching.end(FetchResult.FAILED)
        fetching.written.update(layers)
        if len(fetching.written) == self._num_layers:
            fetching.end(FetchResult.HIT)


def _joined(names: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(names), dtype=np.uint8)
