"""The settings that every service has. A service's own struct extends this one."""

from typing import Annotated

import msgspec
from msgspec import Meta

from libs.telemetry.logs import LogFormat, LogLevel


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that every service has."""

    name: Annotated[
        str,
        # Files and folders are called so, too: neither "." nor "..".
        Meta(
            description="what people call this process; stable over restarts",
            pattern=r"^(?!\.+$)[A-Za-z0-9_.-]*$",
        ),
    ] = ""
    nats_server: Annotated[str, Meta(description="where the message broker is", min_length=1)] = (
        "nats://127.0.0.1:4222"
    )
    link_secret: Annotated[
        str,
        Meta(
            description="shared by all processes of a mesh; proves a peer of a Link", extra={"secret": True}
        ),
    ] = ""
    probe_host: Annotated[str, Meta(description="where /live, /ready and /metrics listen")] = "127.0.0.1"
    probe_port: Annotated[int, Meta(description="their port; 0 takes any free one", ge=0, le=65535)] = 0
    drain_timeout_seconds: Annotated[
        float, Meta(description="how long work in progress may go on after SIGTERM", ge=0)
    ] = 30.0
    log_level: Annotated[LogLevel, Meta(description="the least that is logged")] = "info"
    log_format: Annotated[LogFormat, Meta(description="auto: for people on a terminal, else JSON")] = "auto"
    otel_exporter_otlp_endpoint: Annotated[
        str, Meta(description="export traces here by OTLP/HTTP, as http://host:4318; empty: no traces")
    ] = ""
