"""Settings of the decode worker."""

from typing import Annotated, Literal

from msgspec import Meta

from libs.worker.stores.settings import StoreSettings


class DecodeWorkerSettings(StoreSettings, frozen=True, kw_only=True):
    """Adopts the KV of prompts that ran elsewhere, generates, streams tokens to gateways."""

    role: Annotated[
        Literal["decode", "both"], Meta(description="both: also runs prompts, where no prefill worker is")
    ] = "decode"
    max_held: Annotated[
        int, Meta(description="sequences that may be held here, running or awaited", ge=1)
    ] = 1024
    store_finished: Annotated[
        bool, Meta(description="whether the KV of finished sequences goes to the KV stores")
    ] = True
