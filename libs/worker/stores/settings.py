"""Settings of a worker's dealings with the KV stores."""

from typing import Annotated, Literal

from msgspec import Meta

from libs.worker.settings import WorkerSettings


class StoreSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of a worker that uses the KV stores."""

    store_find_timeout_seconds: Annotated[
        float, Meta(description="a KV store that answers no faster holds nothing", gt=0)
    ] = 0.25
    store_fetch_timeout_seconds: Annotated[
        float, Meta(description="a prefix that arrives no faster is computed", gt=0)
    ] = 2.0
    store_fetch_when: Annotated[
        Literal["faster", "always"],
        Meta(
            description="faster: not what is computed sooner; always: whatever it costs, within the timeouts"
        ),
    ] = "faster"
    store_put_mib: Annotated[
        int, Meta(description="KV kept for the KV stores until it is sent; what exceeds it is not put", ge=0)
    ] = 256
