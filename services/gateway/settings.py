"""Settings of the gateway."""

from typing import Annotated, Literal

from msgspec import Meta

from libs.config.errors import BadSetting
from libs.runtime.settings import RuntimeSettings


class GatewaySettings(RuntimeSettings, frozen=True, kw_only=True):
    """The HTTP face of the mesh: OpenAI-compatible requests in, streams of tokens out."""

    model: Annotated[
        str, Meta(description="name, path or repository of the model; its tokenizer is read", min_length=1)
    ] = "smollm2-135m-instruct"
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="names that clients may use; default: the last part of --model")
    ] = ()
    host: Annotated[str, Meta(description="where the API listens")] = "127.0.0.1"
    port: Annotated[int, Meta(description="its port; 0 takes any free one", ge=0, le=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="keys that clients must show one of; none: no key is needed", extra={"secret": True}
        ),
    ] = ()
    admin_key: Annotated[
        str,
        Meta(
            description="what calls that change the mesh must show; none: nobody may make them",
            extra={"secret": True},
        ),
    ] = ""
    max_model_len: Annotated[
        int,
        Meta(
            description="longest prompt and answer together, in tokens; 0: what model and workers take", ge=0
        ),
    ] = 0
    request_timeout_seconds: Annotated[
        float, Meta(description="deadline of a request, from its arrival", gt=0, le=86400)
    ] = 600.0
    move_deadline_seconds: Annotated[
        float, Meta(description="a move by hand that has not switched by then is rolled back", gt=0)
    ] = 60.0
    replay: Annotated[
        Literal["on", "off"], Meta(description="whether a sequence goes on elsewhere when its worker is lost")
    ] = "on"
    replay_patience_seconds: Annotated[
        float, Meta(description="how long such a sequence waits while no worker is there at all", ge=0)
    ] = 30.0
    max_attempts: Annotated[
        int, Meta(description="on how many workers a sequence may be begun", ge=1, le=100)
    ] = 3
    max_concurrent_requests: Annotated[
        int, Meta(description="generating requests held at a time; 429 beyond", ge=1)
    ] = 2048
    max_body_bytes: Annotated[int, Meta(description="largest request body; 413 beyond", ge=1024)] = (
        8 * 1024 * 1024
    )
    max_buffered_bytes: Annotated[
        int, Meta(description="bytes of a stream that may wait for a slow client", ge=4096)
    ] = 256 * 1024
    flush_timeout_seconds: Annotated[
        float, Meta(description="how long a client may take to read the rest of a finished stream", gt=0)
    ] = 30.0

    def __post_init__(self) -> None:
        """Raises BadSetting where holders of an API key could change the mesh."""
        if self.admin_key and self.admin_key in self.api_key:
            raise BadSetting("--admin-key", "(secret)", "a key that is none of those in --api-key")
