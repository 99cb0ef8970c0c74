"""What the simulator is asked, as flags."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from libs.cost.fetch import FetchCost
from libs.cost.prefill import PrefillCost
from libs.kv.eviction import EvictionKind
from libs.kv.write_policy import WritePolicy
from libs.simulator.shape import ClusterShape, DecodeCost, DecodeShape, PrefillShape, StoreShape
from libs.simulator.synthetic import Arrivals, SyntheticLoad


class SimulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Replays a trace, or a made-up load, through the live policies and compares them."""

    policy: Annotated[tuple[str, ...], Meta(description="routing policies to compare; none named: all")] = ()
    balance: Annotated[
        bool,
        Meta(
            description="compare the migration coordinator's loop on and off, instead of policies: long "
            "prompts first, long answers later"
        ),
    ] = False
    device_share: Annotated[
        float, Meta(description="with --balance: busy seconds per second that a device may have", gt=0, le=1)
    ] = 0.25
    output: Annotated[Literal["table", "json"], Meta(description="what to print")] = "table"
    seed: Annotated[int, Meta(description="of everything random", ge=0)] = 0
    trace: Annotated[
        tuple[str, ...],
        Meta(description="JSON lines (Mooncake's, a store's) or Azure's CSV; none: a made-up load"),
    ] = ()
    speed_up: Annotated[float, Meta(description="arrivals of the trace so many times as dense", gt=0)] = 1.0
    requests: Annotated[
        int, Meta(description="requests to replay; 0: the whole trace, 10000 of a made-up load", ge=0)
    ] = 0

    arrivals: Annotated[Arrivals, Meta(description="made-up load: how requests arrive")] = Arrivals.POISSON
    requests_per_second: Annotated[float, Meta(description="made-up load: mean rate", gt=0)] = 10.0
    prefixes: Annotated[int, Meta(description="made-up load: shared prefixes", ge=1)] = 64
    zipf_exponent: Annotated[float, Meta(description="made-up load: 0 makes prefixes alike", ge=0)] = 1.2
    prefix_tokens: Annotated[int, Meta(description="made-up load: of each shared prefix", ge=0)] = 2048
    own_tokens: Annotated[int, Meta(description="made-up load: mean behind the prefix", ge=1)] = 256
    output_tokens: Annotated[int, Meta(description="made-up load: mean", ge=1)] = 64

    prefill: Annotated[int, Meta(description="prefill instances", ge=1)] = 4
    decode: Annotated[int, Meta(description="decode instances", ge=1)] = 4
    stores: Annotated[int, Meta(description="KV stores", ge=0)] = 1
    block_size: Annotated[int, Meta(description="tokens of a block; 512 in Mooncake traces", ge=1)] = 512
    block_bytes: Annotated[int, Meta(description="of a block in all layers", ge=1)] = 64 << 20
    layers: Annotated[int, Meta(description="of the model", ge=1)] = 32
    max_num_batched_tokens: Annotated[int, Meta(description="tokens in one prefill step", ge=1)] = 2048
    prefill_blocks: Annotated[int, Meta(description="KV blocks of a prefill instance", ge=1)] = 1000
    decode_blocks: Annotated[int, Meta(description="KV blocks of a decode instance", ge=1)] = 4000
    memory_blocks: Annotated[int, Meta(description="KV blocks in the memory of a store", ge=1)] = 10_000
    disk_blocks: Annotated[int, Meta(description="KV blocks on the disk of a store", ge=0)] = 0
    eviction: Annotated[EvictionKind, Meta(description="what a store evicts first")] = "lru"
    write_policy: Annotated[WritePolicy, Meta(description="when a store writes to disk")] = "write_through"
    ttl_seconds: Annotated[
        float, Meta(description="stores drop blocks unused for longer; 0: never", ge=0)
    ] = 0.0
    max_waiting_tokens: Annotated[
        int, Meta(description="a prefill instance with more prompt tokens queued gets no further ones", ge=1)
    ] = 32768

    step_seconds: Annotated[float, Meta(description="a prefill step by itself", gt=0)] = 5e-3
    token_seconds: Annotated[float, Meta(description="a new token of a prompt", gt=0)] = 4e-5
    pair_seconds: Annotated[float, Meta(description="a pair of tokens that attend", gt=0)] = 1.5e-9
    fetch_latency_seconds: Annotated[float, Meta(description="of a fetch", ge=0)] = 2e-3
    fetch_bytes_per_second: Annotated[float, Meta(description="out of a store's memory", gt=0)] = 1e10
    disk_bytes_per_second: Annotated[float, Meta(description="of a store's disk", gt=0)] = 3e9
    decode_step_seconds: Annotated[float, Meta(description="a decode step by itself", gt=0)] = 2e-2
    decode_sequence_seconds: Annotated[float, Meta(description="each sequence of a step", ge=0)] = 1e-4
    decode_token_seconds: Annotated[float, Meta(description="each token of context in a step", ge=0)] = 5e-8

    def shape(self) -> ClusterShape:
        """The cluster these flags describe."""
        prefill = PrefillCost(self.step_seconds, self.token_seconds, self.pair_seconds)
        decode = DecodeCost(self.decode_step_seconds, self.decode_sequence_seconds, self.decode_token_seconds)
        fetch = FetchCost(self.fetch_latency_seconds, self.fetch_bytes_per_second, self.disk_bytes_per_second)
        return ClusterShape(
            num_prefill=self.prefill,
            num_decode=self.decode,
            num_stores=self.stores,
            prefill=PrefillShape(
                cost=prefill, num_blocks=self.prefill_blocks, max_step_tokens=self.max_num_batched_tokens
            ),
            decode=DecodeShape(cost=decode, num_blocks=self.decode_blocks),
            store=StoreShape(
                num_memory_blocks=self.memory_blocks,
                num_disk_blocks=self.disk_blocks,
                fetch=fetch,
                eviction=self.eviction,
                write_policy=self.write_policy,
                ttl_seconds=self.ttl_seconds or None,
            ),
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            num_layers=self.layers,
            max_waiting_tokens=self.max_waiting_tokens,
        )

    def load(self) -> SyntheticLoad:
        """The made-up load these flags describe."""
        return SyntheticLoad(
            num_requests=self.requests or 10_000,
            requests_per_second=self.requests_per_second,
            arrivals=self.arrivals,
            num_prefixes=self.prefixes,
            zipf_exponent=self.zipf_exponent,
            num_prefix_tokens=self.prefix_tokens,
            num_own_tokens=self.own_tokens,
            num_output_tokens=self.output_tokens,
        )
