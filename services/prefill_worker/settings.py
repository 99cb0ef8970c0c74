"""Settings of the prefill worker."""

from typing import Annotated

from msgspec import Meta

from libs.worker.settings import WorkerSettings


class PrefillWorkerSettings(WorkerSettings, frozen=True, kw_only=True):
    """Runs prompts in chunks and hands their KV over layer by layer as it is made."""

    max_waiting: Annotated[int, Meta(description="prompts that may be here, waiting or running", ge=1)] = 512
    connect_timeout_seconds: Annotated[
        float, Meta(description="a decode worker that does not answer a Link in time is given up", gt=0)
    ] = 2.0
    send_timeout_seconds: Annotated[
        float, Meta(description="a decode worker that takes a frame no faster is given up", gt=0)
    ] = 10.0
    store_find_timeout_seconds: Annotated[
        float, Meta(description="a KV store that answers no faster holds nothing", gt=0)
    ] = 0.25
    store_fetch_timeout_seconds: Annotated[
        float, Meta(description="a prefix that arrives no faster is computed", gt=0)
    ] = 2.0
    store_put_mib: Annotated[
        int, Meta(description="KV kept for the KV store until it is sent; what exceeds it is not put", ge=0)
    ] = 256
