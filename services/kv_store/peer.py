"""One worker's Link as the store serves it: puts come in, fetches go out."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import structlog

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
from libs.transport.port import Link, LinkError, Received
from services.kv_store.arena import Shape
from services.kv_store.dram_tier import DramTier, LayerCorrupt, Put, PutRefused
from services.kv_store.metrics import KvStoreMetrics

MAX_PUTS = 32
"""Puts of one worker under way at once; each holds memory that nobody can use yet."""
MAX_FETCHES = 64
"""Fetches of one worker that wait. Beyond, the Link's credits hold the worker back."""

log = structlog.get_logger()


class ProtocolBroken(Exception):
    """The peer sent what no worker sends."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    fetch_id: int
    names: Sequence[bytes]
    shape: Shape | None
    """None: they were not there."""


class Peer:
    """Serves one Link until it is lost."""

    def __init__(
        self, link: Link, tier: DramTier, metrics: KvStoreMetrics, send_timeout_seconds: float
    ) -> None:
        self._link, self._tier, self._metrics = link, tier, metrics
        self._send_timeout_seconds = send_timeout_seconds
        self._puts: dict[int, Put] = {}
        # A Fetch that was missed is queued too, so that answers keep the order of the questions.
        self._fetches: asyncio.Queue[_Wanted] = asyncio.Queue(MAX_FETCHES)

    async def serve(self) -> None:
        """Returns when the Link is lost; then nothing of it is held any more."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_fetched())
                tasks.create_task(self._receive())
        except* (LinkError, HeaderUndecodable, ProtocolBroken) as ended:
            log.info("store_peer_ended", peer=self._link.peer, reason=str(ended.exceptions[0]))
        finally:
            for put in self._puts.values():
                self._drop(put, "cut")
            self._puts.clear()
            while not self._fetches.empty():
                wanted = self._fetches.get_nowait()
                self._end_fetch(wanted, "cut")
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
                self._put_layer(layer, frame)
            case Fetch() as fetch:
                names = _names_of(frame)
                wanted = _Wanted(fetch.fetch_id, names, self._tier.begin_fetch(names))
                try:
                    await self._fetches.put(wanted)
                except asyncio.CancelledError:
                    # The Link died while the queue was full: nobody else knows of these pins.
                    self._end_fetch(wanted, "cut")
                    raise
            case other:
                raise ProtocolBroken(f"a worker sent {type(other).__name__} to the store")

    def _begin_put(self, header: PutNames, names: list[bytes]) -> None:
        if header.put_id in self._puts or len(self._puts) >= MAX_PUTS:
            self._metrics.puts.labels("refused").inc()
            return
        evicted_before = self._tier.num_evicted
        try:
            put = self._tier.begin_put(names, header.num_layers, header.layer_bytes, time.monotonic())
        except PutRefused as refusal:
            log.debug("put_refused", reason=str(refusal))
            self._metrics.puts.labels("refused").inc()
            return
        self._puts[header.put_id] = put
        self._metrics.evicted_blocks.inc(self._tier.num_evicted - evicted_before)

    def _put_layer(self, header: PutLayer, frame: Received) -> None:
        put = self._puts.get(header.put_id)
        if put is None:
            return  # The put was refused; its layers were on their way already.
        self._metrics.transfer_bytes.labels("received").inc(frame.body.size)
        layers = range(header.layer, header.layer + header.num_layers)
        try:
            if self._tier.put_layers(put, layers, frame.body, header.checksum):
                del self._puts[header.put_id]
                self._metrics.puts.labels("held").inc()
        except PutRefused as refusal:
            log.warning("put_dropped", reason=str(refusal), peer=self._link.peer)
            del self._puts[header.put_id]
            self._drop(put, "corrupt" if isinstance(refusal, LayerCorrupt) else "refused")

    def _drop(self, put: Put, result: str) -> None:
        self._tier.drop_put(put)
        self._metrics.puts.labels(result).inc()

    async def _send_fetched(self) -> NoReturn:
        while True:
            wanted = await self._fetches.get()
            result = "cut"
            try:
                result = await self._send(wanted)
            finally:
                self._end_fetch(wanted, result)

    async def _send(self, wanted: _Wanted) -> str:
        if wanted.shape is None:
            header = encode_header(FetchMissed(fetch_id=wanted.fetch_id))
            await self._link.send(header, timeout_seconds=self._send_timeout_seconds)
            return "missed"
        num_layers, layer_bytes = wanted.shape
        for layers in layer_groups(num_layers, layer_bytes * len(wanted.names)):
            started = time.monotonic()
            body, checksum = self._tier.arena.read_layers(wanted.names, layers)
            fetched = Fetched(
                fetch_id=wanted.fetch_id,
                layer=layers.start,
                num_layers=len(layers),
                num_blocks=len(wanted.names),
                checksum=checksum,
            )
            await self._link.send(encode_header(fetched), body, timeout_seconds=self._send_timeout_seconds)
            self._metrics.transfer_bytes.labels("sent").inc(body.size)
            self._metrics.transfer_seconds.observe(time.monotonic() - started)
        return "sent"

    def _end_fetch(self, wanted: _Wanted, result: str) -> None:
        if wanted.shape is not None:
            self._tier.end_fetch(wanted.names)
        self._metrics.fetches.labels(result).inc()


def _names_of(frame: Received) -> list[bytes]:
    try:
        return split_names(frame.body.tobytes())
    except ValueError as error:
        raise ProtocolBroken(str(error)) from error
