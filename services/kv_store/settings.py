"""Settings of the KV store."""

from typing import Annotated, Literal

from msgspec import Meta

from libs.runtime.settings import RuntimeSettings


class KvStoreSettings(RuntimeSettings, frozen=True, kw_only=True):
    """Keeps KV blocks of all workers in memory, found by name."""

    memory_gib: Annotated[float, Meta(description="memory for blocks, in GiB", gt=0)] = 1.0
    lease_seconds: Annotated[
        float, Meta(description="how long blocks are kept for a worker that was told of them", gt=0)
    ] = 5.0
    transport: Annotated[
        Literal["ucx", "shm", "memory"], Meta(description="how KV travels between processes")
    ] = "ucx"
    link_host: Annotated[str, Meta(description="where Links listen", min_length=1)] = "127.0.0.1"
    send_timeout_seconds: Annotated[
        float, Meta(description="a peer that takes a frame no faster is given up", gt=0)
    ] = 5.0
