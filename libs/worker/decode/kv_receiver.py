"""One prefill worker's Link: verifies the KV that comes in and puts it into the engine's pool."""

import asyncio
import time
from collections import Counter

import structlog

from libs.engine.engine import Engine
from libs.engine.errors import EngineError
from libs.kv.checksum import checksum
from libs.kv.tensors import BlockShape
from libs.request.outcome import FailureReason
from libs.transport.frames import (
    HandOver,
    HandOverFailed,
    HeaderUndecodable,
    LayerBlocks,
    StillQueued,
    decode_header,
)
from libs.transport.port import Link, LinkError, Received
from libs.worker.decode.decode_requests import DecodeRequests
from libs.worker.decode.received_blocks import OutOfPlace, ReceivedBlocks
from libs.worker.decode.sequences import HeldSequence, Stage
from libs.worker.metrics import WorkerMetrics

log = structlog.get_logger()


class ProtocolBroken(Exception):
    """The peer sent what no prefill worker sends."""


class KvReceiver:
    """Serves one Link until it is lost; then what waited for it has failed."""

    def __init__(
        self,
        link: Link,
        requests: DecodeRequests,
        engine: Engine,
        shape: BlockShape,
        metrics: WorkerMetrics,
    ) -> None:
        self._link, self._requests, self._engine = link, requests, engine
        self._shape, self._metrics = shape, metrics

    async def serve(self) -> None:
        """Returns when the Link is lost."""
        reason = "this worker is closing"
        link = Counter((self._link.peer,))
        self._requests.num_links += link
        try:
            # Frames are not waited for one by one: the engine takes writes between steps, all that are there.
            # The Link's credits bound how many are under way. What was handed over before the end
            # is still taken in.
            async with asyncio.TaskGroup() as tasks:
                reason = await self._receive(tasks)
        finally:
            log.info("prefill_link_ended", peer=self._link.peer, reason=reason)
            self._requests.num_links -= link
            self._requests.peer_lost(self._link.peer, f"the Link from its prefill worker ended: {reason}")
            await self._link.close()

    async def _receive(self, tasks: asyncio.TaskGroup) -> str:
        """Handle frames until there will be no more; tells why."""
        while True:
            try:
                self._handle(await self._link.receive(), tasks)
            except (LinkError, HeaderUndecodable, ProtocolBroken) as ended:
                return str(ended)

    def _handle(self, frame: Received, tasks: asyncio.TaskGroup) -> None:
        is_kept = False
        try:
            match decode_header(frame.header):
                case LayerBlocks() as blocks:
                    is_kept = self._take_blocks(blocks, frame, tasks)
                case HandOver() as hand_over:
                    if (held := self._awaited(hand_over.request_id)) is not None:
                        tasks.create_task(self._start_decode(held, hand_over))
                case HandOverFailed() as failed:
                    if (held := self._awaited(failed.request_id)) is not None:
                        self._requests.fail(held, failed.reason, failed.detail)
                case StillQueued() as queued:
                    for request_id in queued.request_ids:
                        if (held := self._awaited(request_id)) is not None:
                            self._requests.renew(held)
                case other:
                    raise ProtocolBroken(f"a prefill worker sent {type(other).__name__}")
        finally:
            if not is_kept:
                frame.release()

    def _awaited(self, request_id: str) -> HeldSequence | None:
        """None for what was aborted meanwhile, and for what this peer was not asked to bring."""
        held = self._requests.sequences.get(request_id)
        is_awaited = held is not None and held.stage is Stage.AWAITING_KV and held.prefill == self._link.peer
        return held if is_awaited else None

    def _take_blocks(self, header: LayerBlocks, frame: Received, tasks: asyncio.TaskGroup) -> bool:
        """True when the frame's memory is still needed."""
        held = self._awaited(header.request_id)
        if held is None or held.received is None:
            return False
        self._metrics.transfer_bytes.labels("received").inc(frame.body.size)
        self._requests.renew(held)
        if held.first_blocks_at is None:
            held.first_blocks_at = time.time()
        try:
            held.received.check(header.layer, header.num_layers, header.first_block, header.num_blocks)
            if checksum(frame.body) != header.checksum:
                raise OutOfPlace(f"layer {header.layer} arrived with another checksum")
            write = tasks.create_task(self._write(held, held.received, header, frame))
        except (OutOfPlace, ValueError) as error:
            log.warning("kv_corrupt", request_id=header.request_id, peer=self._link.peer, reason=str(error))
            self._requests.fail(held, FailureReason.CORRUPT, str(error))
            return False
        held.writes.add(write)
        write.add_done_callback(held.writes.discard)
        return True

    async def _write(
        self, held: HeldSequence, received: ReceivedBlocks, header: LayerBlocks, frame: Received
    ) -> None:
        engine, layers = self._engine, range(header.layer, header.layer + header.num_layers)
        try:
            blocks = self._shape.layers_of(frame.body, header.num_layers, header.num_blocks)
            writes = (
                engine.write_blocks(
                    header.request_id, layer, header.first_block, blocks[layer - header.layer]
                )
                for layer in layers
            )
            # All are waited for, whatever becomes of one: the engine reads the frame's memory until then.
            for layer, written in zip(
                layers, await asyncio.gather(*writes, return_exceptions=True), strict=True
            ):
                if isinstance(written, BaseException):
                    raise written
                if written:
                    received.arrive(layer, 1, header.first_block, header.num_blocks)
        except (EngineError, ValueError) as error:
            self._requests.fail(held, FailureReason.CORRUPT, str(error))
        finally:
            frame.release()

    async def _start_decode(self, held: HeldSequence, hand_over: HandOver) -> None:
        if held.writes:
            await asyncio.wait(held.writes)
        if self._requests.sequences.get(held.request_id) is held:
            await self._requests.start_decode(held, hand_over)
