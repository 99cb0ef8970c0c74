"""One worker's Link as the store serves it: puts come in, fetches go out."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

import structlog

from libs.kv.block_tree import MEMORY
from libs.kv.layer_groups import layer_groups
from libs.kv.names import split_names
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
from libs.transport.port import Bytes, Link, LinkError, Received
from services.kv_store.held_blocks import LayerCorrupt, Nodes, Put, PutRefused
from services.kv_store.metrics import KvStoreMetrics
from services.kv_store.sending import NUM_IN_FLIGHT, FetchSource, SendBuffers
from services.kv_store.store import Store

MAX_PUTS = 32
"""Puts of one worker under way at once; each holds memory that nobody can use yet."""
MAX_FETCHES = 64
"""Fetches of one worker that wait. Beyond, the Link's credits hold the worker back."""
MAX_FRAME_BYTES = 512 << 20
"""A fetch of which one layer is larger is refused."""

log = structlog.get_logger()


class ProtocolBroken(Exception):
    """The peer sent what no worker sends."""


class TokenBucket:
    """Holds what is sent to `bytes_per_second` on average; 0 lets everything through."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """When a line of this rate would have carried these, after all that was taken before; `now` where
        there is no limit."""
        if self._bytes_per_second <= 0:
            return now
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
        return self._free_at


@dataclass(frozen=True, slots=True)
class _Wanted:
    fetch_id: int
    nodes: Nodes | None
    """None: they were not there."""


class Peer:
    """Serves one Link until it is lost. `bucket` holds what is sent to all peers to a rate."""

    def __init__(
        self,
        link: Link,
        store: Store,
        metrics: KvStoreMetrics,
        send_timeout_seconds: float,
        bucket: TokenBucket,
    ) -> None:
        self._link, self._store, self._metrics, self._bucket = link, store, metrics, bucket
        self._send_timeout_seconds = send_timeout_seconds
        self._puts: dict[int, tuple[Put, PutNames]] = {}
        self._fetches: asyncio.Queue[_Wanted] = asyncio.Queue(MAX_FETCHES)
        self._from_disk: asyncio.Queue[_Wanted] = asyncio.Queue(MAX_FETCHES)
        """Those that wait for a disk hold nobody up."""

    async def serve(self) -> None:
        """Returns when the Link is lost; then nothing of it is held any more."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for fetches in (self._fetches, self._from_disk):
                    tasks.create_task(self._send_fetched(fetches))
                tasks.create_task(self._receive())
        except* (LinkError, HeaderUndecodable, ProtocolBroken) as ended:
            log.info("store_peer_ended", peer=self._link.peer, reason=_reason(ended))
        finally:
            for put, _ in self._puts.values():
                self._drop(put, "cut")
            self._puts.clear()
            for fetches in (self._fetches, self._from_disk):
                while not fetches.empty():
                    self._end_fetch(fetches.get_nowait(), "cut")
            await self._link.close()

    async def _receive(self) -> NoReturn:
        while True:
            frame = await self._link.receive()
            try:
                await self._handle(frame)
            finally:
                frame.release()

    async def _handle(self, frame: Received) -> None:
        match decode_header(frame.header):
            case PutNames() as put:
                self._begin_put(put, _names_of(frame))
            case PutLayer() as layer:
                await self._put_layer(layer, frame)
            case Fetch() as fetch:
                wanted = _Wanted(fetch.fetch_id, self._store.begin_fetch(_names_of(frame)))
                try:
                    await self._queue_for(wanted).put(wanted)
                except asyncio.CancelledError:
                    # The Link died while the queue was full: nobody else knows of these pins.
                    self._end_fetch(wanted, "cut")
                    raise
            case other:
                raise ProtocolBroken(f"a worker sent {type(other).__name__} to the store")

    def _begin_put(self, header: PutNames, names: list[bytes]) -> None:
        try:
            if header.put_id in self._puts or len(self._puts) >= MAX_PUTS:
                raise PutRefused(f"put {header.put_id} beside {len(self._puts)} others, each with its own id")
            self._puts[header.put_id] = self._store.begin_put(header, names), header
        except PutRefused as refusal:
            log.debug("put_refused", reason=str(refusal))
            self._metrics.puts.labels("refused").inc()

    async def _put_layer(self, header: PutLayer, frame: Received) -> None:
        if header.put_id not in self._puts:
            return  # The put was refused; its layers were on their way already.
        put, names = self._puts[header.put_id]
        self._metrics.transfer_bytes.labels("received").inc(frame.body.size)
        layers = range(header.layer, header.layer + header.num_layers)
        try:
            if await self._store.blocks.put_layers(put, layers, frame.body, header.checksum):
                del self._puts[header.put_id]
                self._store.commit(put, names)
                self._metrics.puts.labels("held").inc()
        except PutRefused as refusal:
            log.warning("put_dropped", reason=str(refusal), peer=self._link.peer)
            del self._puts[header.put_id]
            self._drop(put, "corrupt" if isinstance(refusal, LayerCorrupt) else "refused")

    def _drop(self, put: Put, result: str) -> None:
        self._store.blocks.drop_put(put)
        self._metrics.puts.labels(result).inc()

    def _queue_for(self, wanted: _Wanted) -> "asyncio.Queue[_Wanted]":
        is_here = wanted.nodes is None or self._store.blocks.tree.are_in(wanted.nodes, MEMORY).all()
        return self._fetches if is_here else self._from_disk

    async def _send_fetched(self, fetches: "asyncio.Queue[_Wanted]") -> NoReturn:
        buffers = SendBuffers()
        while True:
            wanted = await fetches.get()
            result = "cut"
            try:
                is_sent = wanted.nodes is not None and await self._send(
                    wanted.fetch_id, wanted.nodes, buffers
                )
                if not is_sent:
                    header = encode_header(FetchMissed(fetch_id=wanted.fetch_id))
                    await self._link.send(header, timeout_seconds=self._send_timeout_seconds)
                result = "sent" if is_sent else "missed"
            finally:
                self._end_fetch(wanted, result)

    async def _send(self, fetch_id: int, nodes: Nodes, buffers: SendBuffers) -> bool:
        """False: not to be had, or no longer. The next layers are gathered while those before travel."""
        store = self._store
        source = FetchSource(store.blocks, nodes, store.loader, store.disk)
        if source.bytes_per_layer > MAX_FRAME_BYTES:
            return False
        async with asyncio.TaskGroup() as tasks:
            sending: deque[asyncio.Task[None]] = deque()
            for layers in layer_groups(source.num_layers, source.bytes_per_layer):
                body = await source.body(layers, buffers)
                if body is None:
                    return False  # once those before have been sent
                if len(sending) == NUM_IN_FLIGHT:
                    await sending.popleft()
                header = Fetched(
                    fetch_id=fetch_id,
                    layer=layers.start,
                    num_layers=len(layers),
                    num_blocks=nodes.size,
                    checksum=body[1],
                )
                due = self._bucket.take(body[0].size, time.monotonic())
                sending.append(tasks.create_task(self._send_layers(header, body[0], due)))
        return True

    async def _send_layers(self, header: Fetched, body: Bytes, due: float) -> None:
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        started = time.monotonic()
        await self._link.send(encode_header(header), body, timeout_seconds=self._send_timeout_seconds)
        self._metrics.transfer_bytes.labels("sent").inc(body.size)
        self._metrics.transfer_seconds.observe(time.monotonic() - started)

    def _end_fetch(self, wanted: _Wanted, result: str) -> None:
        if wanted.nodes is not None:
            self._store.blocks.end_fetch(wanted.nodes)
        self._metrics.fetches.labels(result).inc()


def _reason(ended: BaseExceptionGroup[BaseException]) -> str:
    first: BaseException = ended
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return str(first)


def _names_of(frame: Received) -> list[bytes]:
    try:
        return split_names(frame.body.tobytes())
    except ValueError as error:
        raise ProtocolBroken(str(error)) from error
