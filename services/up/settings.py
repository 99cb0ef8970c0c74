"""Settings of `up`. What it does not know itself it hands on to the services that do."""

from typing import Annotated

import msgspec
from msgspec import Meta

from libs.model.source import DEFAULT_MODEL
from libs.runtime.state_dir import default_state_dir
from services.up.supervision import STABLE_SECONDS


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Starts the whole mesh on this machine. Flags of the services (--dtype, ...) are handed on to them."""

    model: Annotated[
        str, Meta(description="a GGUF file, a Hugging Face directory, or the name of a model", min_length=1)
    ] = DEFAULT_MODEL
    prefill: Annotated[
        int, Meta(description="prefill workers; 0: decode workers run prompts", ge=0, le=64)
    ] = 1
    decode: Annotated[int, Meta(description="decode workers", ge=1, le=64)] = 1
    stores: Annotated[
        int, Meta(description="KV stores, which share the blocks out; 0: nobody finds a prefix", ge=0, le=64)
    ] = 1
    routers: Annotated[int, Meta(description="routers side by side", ge=1, le=16)] = 1
    coordinators: Annotated[
        int,
        Meta(description="migration coordinators, of which one leads; 0: modules stay at home", ge=0, le=16),
    ] = 1
    host: Annotated[str, Meta(description="where the gateway listens", min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(description="its port; 0 takes any free one", ge=0, le=65535)] = 8000
    state_dir: Annotated[str, Meta(description="logs and data; one mesh at a time uses it", min_length=1)] = (
        msgspec.field(default_factory=default_state_dir)
    )
    nats_server: Annotated[str, Meta(description="a broker that is there already; none: start one")] = ""
    threads: Annotated[int, Meta(description="CPU threads of each worker; 0 shares the cores out", ge=0)] = 0
    drain_timeout_seconds: Annotated[
        float, Meta(description="how long answers in progress may go on after Ctrl-C", ge=0)
    ] = 30.0
    stable_seconds: Annotated[
        float,
        Meta(description="who ran so long and died is started again soon, who died sooner ever later", ge=0),
    ] = STABLE_SECONDS
