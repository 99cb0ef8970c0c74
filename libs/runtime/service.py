"""Running a service as a program."""

import os
import socket
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import structlog
import uvloop

from libs.bus.bus import Bus
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.config.errors import SettingsError
from libs.config.load import exit_for, load_settings_or_exit
from libs.runtime.connect import check_url, connect_bus
from libs.runtime.garbage import freeze_garbage
from libs.runtime.http_server import AddressInUse, HttpServer
from libs.runtime.identity import Identity, new_identity
from libs.runtime.life import EXIT_CRASHED, Service, Stop, live
from libs.runtime.probes import probe_app
from libs.runtime.runtime import Runtime
from libs.runtime.settings import RuntimeSettings
from libs.runtime.signals import Parent, end_at_latest_after, stop_on_signals
from libs.telemetry.logs import configure_logs
from libs.telemetry.metrics import new_registry
from libs.telemetry.traces import configure_traces

S = TypeVar("S", bound=RuntimeSettings)

_LEAVE_SECONDS = 1.0
"""What the interpreter may take to leave: it would wait for a thread that still loads weights."""

log = structlog.get_logger()


def run_service(
    kind: ServiceKind, settings_type: type[S], build: Callable[[S], Service], *, serves_probes: bool = True
) -> None:
    """Read settings, live, and end the process: 0 asked to end, 1 broken, 2 bad settings.

    `serves_probes` False is for a program whose own HTTP server has /live, /ready and /metrics.
    """
    settings = load_settings_or_exit(settings_type, kind.value)
    parent = Parent(os.environ)
    if parent.is_gone:
        raise SystemExit(EXIT_CRASHED)  # it died before its death could be signalled to us
    try:
        check_url(settings.nats_server)
    except SettingsError as error:
        exit_for(error, kind.value)
    stop, identity = Stop(), new_identity(kind, settings.name)
    raise SystemExit(uvloop.run(_run(identity, settings, build, serves_probes, stop, parent)))


async def _run(
    identity: Identity,
    settings: S,
    build: Callable[[S], Service],
    serves_probes: bool,
    stop: Stop,
    parent: Parent,
) -> int:
    who = (identity.kind.value, identity.name, identity.incarnation)
    configure_logs(*who, level=settings.log_level, log_format=settings.log_format)
    tracing = configure_traces(*who, endpoint=settings.otel_exporter_otlp_endpoint)
    stop_on_signals(stop, parent, drain_timeout_seconds=settings.drain_timeout_seconds)
    bus = await connect_bus(settings.nats_server, identity.name, stop.asked)
    if bus is None:
        return 0
    try:
        service = build(settings)
        exit_code = await live_on(
            bus, identity, settings, service, stop, serves_probes=serves_probes, on_opened=freeze_garbage
        )
    finally:
        await bus.close()
        tracing.close()
    log.info("service_ended", exit_code=exit_code)
    end_at_latest_after(_LEAVE_SECONDS, exit_code)
    return exit_code


async def live_on(
    bus: Bus,
    identity: Identity,
    settings: RuntimeSettings,
    service: Service,
    stop: Stop,
    *,
    serves_probes: bool,
    on_opened: Callable[[], None] = lambda: None,
) -> int:
    """One life on a bus that is connected; returns the exit code. Component tests start here.

    `on_opened` is called when everything is acquired, before others hear that it is ready.
    """
    registry = new_registry(
        lambda: runtime.presence.kind.value, identity.name, identity.incarnation, version=version("kvmesh")
    )
    presence = Presence(
        kind=identity.kind,
        name=identity.name,
        incarnation=identity.incarnation,
        state=ServiceState.STARTING,
        pid=os.getpid(),
        host=socket.gethostname(),
    )
    runtime = Runtime(identity, bus, registry, presence)
    probes = HttpServer(
        probe_app(lambda: runtime.presence, registry),
        host=settings.probe_host,
        port=settings.probe_port,
        drain_timeout_seconds=1,
    )
    try:
        if serves_probes:
            runtime.describe(http_address=await probes.open())
        drain_timeout_seconds = settings.drain_timeout_seconds
        return await live(
            service, runtime, stop, drain_timeout_seconds=drain_timeout_seconds, on_opened=on_opened
        )
    except AddressInUse as error:
        log.error("probes_not_opened", error=str(error))  # noqa: TRY400 - the text says it all
        return EXIT_CRASHED
    finally:
        await probes.close()
