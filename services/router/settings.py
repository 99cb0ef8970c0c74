"""Settings of the router."""

from typing import Annotated, Literal

from msgspec import Meta

from libs.runtime.settings import RuntimeSettings


class RouterSettings(RuntimeSettings, frozen=True, kw_only=True):
    """Places each request on a prefill and a decode instance. Several may run side by side."""

    policy: Annotated[
        Literal["least_load", "round_robin"], Meta(description="how an instance is chosen among the usable")
    ] = "least_load"
    max_queue: Annotated[int, Meta(description="requests that may wait for a place", ge=0, le=255)] = 200
    """Below the number of handlers that the bus runs at once, since each request waits in its own."""
    max_waiting_tokens: Annotated[
        int, Meta(description="a prefill instance with more prompt tokens queued gets no further ones", ge=1)
    ] = 32768
    no_workers_grace_seconds: Annotated[
        float, Meta(description="how long requests wait for a first usable pair of instances", ge=0)
    ] = 5.0
    starting_grace_seconds: Annotated[
        float, Meta(description="the same while some worker is starting", ge=0)
    ] = 30.0
    stale_after_seconds: Annotated[
        float, Meta(description="a worker whose load reports stay out for longer is not used", gt=0)
    ] = 3.0
