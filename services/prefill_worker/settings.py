"""Settings of the prefill worker."""

from typing import Annotated

from msgspec import Meta

from libs.worker.stores.settings import StoreSettings


class PrefillWorkerSettings(StoreSettings, frozen=True, kw_only=True):
    """Runs prompts in chunks and hands their KV over layer by layer as it is made."""

    max_waiting: Annotated[int, Meta(description="prompts that may be here, waiting or running", ge=1)] = 512
    connect_timeout_seconds: Annotated[
        float, Meta(description="a decode worker that does not answer a Link in time is given up", gt=0)
    ] = 2.0
    send_timeout_seconds: Annotated[
        float, Meta(description="a decode worker that takes a frame no faster is given up", gt=0)
    ] = 10.0
