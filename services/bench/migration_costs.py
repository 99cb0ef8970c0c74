"""What the formula of a step's overhead needs, measured: the way to a host and back, and attention."""

import asyncio
import math
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from kernels.paged_attention.choose import choose_paged_attention
from kernels.paged_attention.contract import AttentionBatch
from libs.bus.messages.presence import Presence
from libs.cost.migration import LinkCost, ModelShape
from libs.engine.hosting.calls import Settle, WriteBlocks
from libs.engine.hosting.port import Answer
from libs.engine.mailbox import Mailbox
from libs.engine.memory.pool import BlockLayout, Pool
from libs.engine.thread_loop import ThreadLoop
from libs.placement.module import Module, heads_of
from libs.transport.choose import make_transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.owner.remote_host import HostCalls, HostLink
from services.bench.machine import best_seconds

NUM_ROUND_TRIPS = 200
NUM_WARM_UPS = 20
NUM_BLOCKS = 128
NUM_WRITES = 24
NUM_REWRITES = 5
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class HostingCost:
    """Of a call to a host that has nothing else to do."""

    round_trip_seconds: float
    """From the thread that asks over the Link to the host's engine thread and back; nothing is done there."""
    bytes_per_second: float
    """Of KV that is written there."""
    rewrite_bytes_per_second: float
    """Of KV in a pool of one worker, when blocks change their layout."""

    @property
    def link(self) -> LinkCost:
        """As the formula takes it."""
        return LinkCost(self.bytes_per_second, self.round_trip_seconds / 2)


async def measure_hosting(host: Presence, shape: ModelShape, secret: str) -> HostingCost:
    """As a home of its own that has some heads at the worker with this presence. One thread makes the calls
    and turns the loop of their Link, as an engine's does."""
    name, caller = f"bench-{os.getpid()}", Caller()
    transport = make_transport("ucx", name, secret.encode())
    running = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1) as thread:
        calls = await running.run_in_executor(thread, caller.connect, host, name, secret)
        home = HostLink(
            await transport.connect(host.hosting_address, timeout_seconds=_TIMEOUT_SECONDS),
            calls,
            fingerprint=host.model_fingerprint,
            on_leaving=lambda: None,
            timeout_seconds=_TIMEOUT_SECONDS,
            ping_seconds=1.0,
        )
        serving = asyncio.create_task(home.serve())
        try:
            module = heads_of(0, shape.num_layers, (0,))
            await home.open(
                "bench", module, num_blocks_wanted=NUM_BLOCKS, num_blocks_least=NUM_BLOCKS, has_weights=False
            )
            return await running.run_in_executor(thread, _measure_calls, home, caller, shape)
        finally:
            await home.close_module("bench")
            await home.close()
            await serving
            await running.run_in_executor(thread, caller.close)
            await transport.close()


class Caller:
    """Of one thread: its loop, and its Links for calls."""

    def __init__(self) -> None:
        self._loop = ThreadLoop()
        self.mailbox = Mailbox[None](self._loop)

    def connect(self, host: Presence, name: str, secret: str) -> HostCalls:
        """Raises HostLost."""
        self._links = CallLinks(
            self._loop,
            lambda: make_transport("ucx", name, secret.encode()),
            wake=self.mailbox.wake,
            timeout_seconds=_TIMEOUT_SECONDS,
            on_call_done=lambda _: None,
            on_hosted_call_done=lambda _: None,
        )
        connecting = self._links.connect(host.incarnation, host.calls_address, lambda _calls, _why: None)
        return self._loop.loop.run_until_complete(connecting)

    def close(self) -> None:
        """Cut the Links, too."""
        self._loop.close()


def _measure_calls(home: HostLink, caller: Caller, shape: ModelShape) -> HostingCost:
    def settle() -> float:
        began = time.perf_counter()
        answer: Answer = home.call(Settle())
        while not answer.is_done:  # a Link to a silent host is lost in the end, which is an answer, too
            caller.mailbox.sleep(_TIMEOUT_SECONDS)
        answer.result()
        return time.perf_counter() - began

    waits = [settle() for _ in range(NUM_WARM_UPS + NUM_ROUND_TRIPS)][NUM_WARM_UPS:]
    round_trip = statistics.median(waits)
    dtype = {4: torch.float32, 2: torch.bfloat16}[shape.element_bytes]
    kv = torch.zeros(NUM_BLOCKS, 1, 2, shape.block_size, shape.head_dim, dtype=dtype)
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        for layer in range(NUM_WRITES):
            home.call(WriteBlocks("bench", layer, torch.arange(NUM_BLOCKS).numpy(), kv))
        settle()
        best = min(best, time.perf_counter() - began)
    written = NUM_WRITES * kv.nbytes / max(1e-9, best - round_trip)
    return HostingCost(round_trip, written, _rewrite_bytes_per_second(shape, dtype))


def _rewrite_bytes_per_second(shape: ModelShape, dtype: torch.dtype) -> float:
    """Of the KV that stays while one head of all layers leaves."""
    slots = tuple((layer, head) for layer in range(shape.num_layers) for head in range(shape.num_kv_heads))
    whole = BlockLayout(slots, shape.block_size, shape.head_dim, dtype)
    without_one = replace(whole, slots=tuple(slot for slot in slots if slot[1]))
    pool, live, best = Pool(whole, NUM_BLOCKS, torch.device("cpu")), range(NUM_BLOCKS), math.inf
    for _ in range(NUM_REWRITES):
        began = time.perf_counter()
        pool.relayout(without_one, live)
        best = min(best, time.perf_counter() - began)
        pool.relayout(whole, live)
    return NUM_BLOCKS * without_one.block_bytes / best


def attention_seconds(shape: ModelShape, num_kv_heads: int, *, num_sequences: int, num_context: int) -> float:
    """Of one layer's decode step for so many of its KV heads, on this thread; 0 for none."""
    if not num_kv_heads:
        return 0.0
    dtype = {4: torch.float32, 2: torch.bfloat16}[shape.element_bytes]
    attention = choose_paged_attention(torch.device("cpu"), dtype)
    num_blocks = -(-num_context // shape.block_size)
    kv = torch.randn(num_sequences * num_blocks, num_kv_heads, 2, shape.block_size, shape.head_dim).to(dtype)
    q = torch.randn(num_sequences, num_kv_heads * shape.queries_per_kv_head, shape.head_dim).to(dtype)
    batch = AttentionBatch(
        torch.randperm(len(kv)).to(torch.int32).view(num_sequences, num_blocks),
        torch.full((num_sequences,), num_context, dtype=torch.int32),
        torch.arange(num_sequences + 1, dtype=torch.int32),
        1,
        num_context,
    )
    scale = shape.head_dim**-0.5
    return best_seconds(lambda: attention.attend(q, kv, batch, scale), repeats=50)


def attention_parts(
    shape: ModelShape, module: Module, *, num_sequences: int, num_context: int
) -> tuple[float, float]:
    """One layer's attention of the module's heads at the host, and of the others at home."""
    away = len(module.kv_heads)
    remote, local = (
        attention_seconds(shape, heads, num_sequences=num_sequences, num_context=num_context)
        for heads in (away, shape.num_kv_heads - away)
    )
    return remote, local
