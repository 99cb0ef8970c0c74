"""Settings of the KV store."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from libs.kv.eviction import EvictionKind
from libs.kv.write_policy import WritePolicy
from libs.runtime.settings import RuntimeSettings
from libs.runtime.state_dir import default_state_dir
from services.kv_store.disk.settings import FsyncPolicy


class KvStoreSettings(RuntimeSettings, frozen=True, kw_only=True):
    """Keeps KV blocks of all workers in memory and on disk, found by name."""

    memory_gib: Annotated[float, Meta(description="memory for blocks, in GiB", gt=0, le=1 << 20)] = 1.0
    disk_gib: Annotated[
        float,
        Meta(
            description="disk space for blocks, in GiB; 0: memory alone, else 0.04 at least", ge=0, le=1 << 20
        ),
    ] = 4.0
    disk_path: Annotated[
        str,
        Meta(
            description="where stores keep blocks, each in a folder of its name; default: kv in --state-dir"
        ),
    ] = ""
    index_path: Annotated[
        str, Meta(description="their index, RocksDB, likewise; default: beside the blocks")
    ] = ""
    index_cache_mib: Annotated[int, Meta(description="memory of the index for reading, in MiB", ge=1)] = 32
    fsync: Annotated[
        FsyncPolicy, Meta(description="off: leave it to the system; interval: every 5 s; always: each write")
    ] = "interval"
    eviction: Annotated[
        EvictionKind, Meta(description="lru: the least recently used goes first; lfu: the least often, aging")
    ] = "lru"
    write_policy: Annotated[
        WritePolicy,
        Meta(description="to disk: at once, before memory gives them up, or when hit a second time"),
    ] = "write_through"
    ttl_seconds: Annotated[
        float, Meta(description="unused blocks are kept this long; 0: until evicted", ge=0)
    ] = 0.0
    fetch_bytes_per_second: Annotated[
        float, Meta(description="the most that is sent to workers, all together; 0: no limit", ge=0)
    ] = 0.0
    access_trace: Annotated[
        str,
        Meta(
            description="append lookups and puts to this file, or to NAME.jsonl in this folder; empty: do not"
        ),
    ] = ""
    access_trace_mib: Annotated[
        int, Meta(description="its size and that of older ones together, in MiB", ge=1)
    ] = 256
    state_dir: Annotated[str, Meta(description="where state is kept", min_length=1)] = msgspec.field(
        default_factory=default_state_dir
    )
    lease_seconds: Annotated[
        float, Meta(description="how long blocks are kept for a worker that was told of them", gt=0)
    ] = 5.0
    transport: Annotated[
        Literal["auto", "ucx", "shm"],
        Meta(description="how KV travels; auto: shared memory within a host, UCX between hosts"),
    ] = "auto"
    link_host: Annotated[str, Meta(description="where Links listen", min_length=1)] = "127.0.0.1"
    send_timeout_seconds: Annotated[
        float, Meta(description="a peer that takes a frame no faster is given up", gt=0)
    ] = 5.0
