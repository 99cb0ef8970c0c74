"""Settings of the router."""

from typing import Annotated, Literal

from msgspec import Meta

from libs.runtime.settings import RuntimeSettings


class RouterSettings(RuntimeSettings, frozen=True, kw_only=True):
    """Places each request on a prefill and a decode instance. Several may run side by side."""

    policy: Annotated[
        Literal["predicted_ttft", "least_load", "power_of_two", "prefix_affinity", "round_robin", "random"],
        Meta(description="how the instance that runs a prompt is chosen among those with room"),
    ] = "predicted_ttft"
    session_stickiness_seconds: Annotated[
        float,
        Meta(
            description="a session stays with its workers while the queue there is at most this much longer "
            "than elsewhere; 0: sessions do not matter",
            ge=0,
        ),
    ] = 0.0
    max_expected_output_tokens: Annotated[
        int,
        Meta(description="room that is kept free for an answer, at most; within it, what answers take", ge=0),
    ] = 512
    max_known_blocks: Annotated[
        int, Meta(description="blocks whose holders are remembered, some 400 bytes each", ge=1)
    ] = 500_000
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
