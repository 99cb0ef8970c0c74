"""The gateway on the bus: HTTP in, `Place`, `Reserve` and `Prefill` out, token frames in, HTTP out."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette

from libs.bus.messages.generation import TokenFrame
from libs.bus.messages.migration import MigrationUpdate, PlacementUpdate
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind
from libs.bus.subscriptions import Subscription
from libs.mesh.cluster_state import ClusterState
from libs.mesh.workers import names_of
from libs.request.outcome import FailureReason
from libs.runtime.http_server import HttpServer
from libs.runtime.roster import Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from services.gateway.api.app import build_app
from services.gateway.api.http_protocol import ApiHttpProtocol
from services.gateway.api.operations import OPEN_PATHS, OperationsApi, Readiness
from services.gateway.api.serving import ConcurrencyLimit
from services.gateway.generation.block_hashes import layout_of
from services.gateway.generation.dispatch import Dispatch
from services.gateway.generation.endpoints import generation_routes
from services.gateway.generation.live import LiveSequences
from services.gateway.generation.model import ServedModel, TextCodec, default_name, load_codec
from services.gateway.generation.model_api import ModelApi
from services.gateway.generation.readmission import Limits
from services.gateway.generation.requests import RequestReader
from services.gateway.generation.sequence import Failed, Sequence
from services.gateway.generation.stream import ResponseStream, StreamBounds
from services.gateway.mesh.coordinator import LoopWatch
from services.gateway.mesh.mesh_feed import MeshFeed
from services.gateway.mesh.mesh_page import PAGE_PATHS, MeshPage
from services.gateway.mesh.migrations_api import MigrationsApi
from services.gateway.mesh.placement_view import move_document, placement_document
from services.gateway.mesh.roles_api import RolesApi
from services.gateway.mesh.view import (
    instances,
    mesh_status,
    model_filter,
    obstacles,
    serving,
    shortest_context,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.openapi import openapi_document
from services.gateway.settings import GatewaySettings

SHOWN_MOVES = 16
"""In each snapshot of the mesh; GET /v1/mesh/migrations has them all."""


class GatewayService:
    """One gateway. `open_codec` loads the tokenizer and the template of a model; tests share one."""

    def __init__(
        self, settings: GatewaySettings, *, open_codec: Callable[[str], TextCodec] = load_codec
    ) -> None:
        self._settings, self._open_codec = settings, open_codec
        self._limit = ConcurrencyLimit(settings.max_concurrent_requests)
        self._roster = Roster()
        self._cluster = ClusterState(self._roster)
        self._loop: LoopWatch | None = None
        self._served = ServedModel(
            settings.served_model_name or (default_name(settings.model),),
            settings.max_model_len,
            int(time.time()),
            worker_len=lambda: shortest_context(self._services()),
            place_model=lambda: model_filter(self._roster.all(), settings.model),
            layout=lambda: layout_of(self._services()),
        )
        self._feed = MeshFeed(lambda: msgspec.json.encode(self._mesh()))
        self._subscriptions: list[Subscription] = []
        self._server: HttpServer | None = None
        self._live: LiveSequences | None = None

    async def open(self, runtime: Runtime) -> None:
        """Listen at once, so that /live and /ready answer; ready when the tokenizer is loaded."""
        settings = self._settings
        metrics = GatewayMetrics(runtime.registry)
        self._live = live = LiveSequences(metrics)
        limits = Limits(
            replay=settings.replay == "on",
            max_attempts=settings.max_attempts,
            replay_patience_seconds=settings.replay_patience_seconds,
        )
        dispatch = Dispatch(runtime.bus, runtime.incarnation, live, limits, metrics)
        metrics.watch(lambda: live.num_waiting, lambda: len(live), lambda: self._limit.num_inside)
        metrics.mesh_viewers.set_function(lambda: self._feed.num_viewers)
        self._loop = LoopWatch(runtime.bus, self._feed.changed)
        await self._subscribe(runtime, live)
        watching = watch_roster(runtime.bus, self._roster, self._roster_changed, hears_itself=True)
        runtime.spawn("roster", watching)
        runtime.spawn("strays", dispatch.abort_strays())
        runtime.spawn("mesh-feed", self._feed.run())
        runtime.spawn("loop-watch", self._loop.run())
        app = self._app(runtime, dispatch, metrics)
        self._server = HttpServer(app, host=settings.host, port=settings.port, protocol=ApiHttpProtocol)
        runtime.describe(http_address=await self._server.open(), model=settings.model)
        runtime.spawn("http", self._server.wait_ended())
        runtime.progress("loading the tokenizer")
        self._served.codec = await asyncio.to_thread(self._open_codec, settings.model)
        runtime.describe(detail="", max_model_len=self._served.max_model_len())

    async def _subscribe(self, runtime: Runtime, live: LiveSequences) -> None:
        bus = runtime.bus
        self._subscriptions += [
            await bus.subscribe(TokenFrame, live.on_frame, at=runtime.incarnation),
            await bus.subscribe(LoadReport, self._on_load),
            await bus.subscribe(PlacementUpdate, self._on_placement),
            await bus.subscribe(MigrationUpdate, self._on_move),
        ]

    def _app(self, runtime: Runtime, dispatch: Dispatch, metrics: GatewayMetrics) -> Starlette:
        settings = self._settings
        bounds = StreamBounds(settings.max_buffered_bytes, settings.flush_timeout_seconds)
        reader = RequestReader(
            self._served,
            max_body_bytes=settings.max_body_bytes,
            request_timeout_seconds=settings.request_timeout_seconds,
        )

        def stream(sequences: list[Sequence]) -> ResponseStream:
            return ResponseStream(sequences, dispatch, metrics, bounds)

        migrations = MigrationsApi(
            runtime.bus,
            self._cluster,
            deadline_seconds=settings.move_deadline_seconds,
            max_body_bytes=settings.max_body_bytes,
        )
        roles = RolesApi(runtime.bus, self._roster, max_body_bytes=settings.max_body_bytes)
        openapi = msgspec.json.encode(openapi_document())
        operations = OperationsApi(runtime.registry, openapi, readiness=self._readiness, mesh=self._mesh)
        return build_app(
            [
                *generation_routes(reader, stream, self._limit),
                *ModelApi(self._served, max_body_bytes=settings.max_body_bytes).routes(),
                *migrations.routes(),
                *roles.routes(),
                *MeshPage(self._feed, metrics).routes(),
                *operations.routes(),
            ],
            metrics.http_requests,
            api_keys=settings.api_key,
            admin_key=settings.admin_key,
            open_paths=OPEN_PATHS | PAGE_PATHS,
        )

    async def drain(self) -> None:
        """Refuse new requests; return when those inside have their answers."""
        self._limit.close()
        self._feed.close()
        await self._limit.wait_empty()

    async def close(self) -> None:
        """End the requests still inside, then stop listening."""
        self._limit.close()
        self._feed.close()
        if self._live is not None:
            self._live.end_all(Failed(FailureReason.ABORTED, "this gateway is shutting down"))
        if self._server is not None:
            await self._server.close()
        for subscription in self._subscriptions:
            await subscription.close()

    def _services(self) -> list[Presence]:
        """Everybody, but of workers only those of this gateway's model where some name it."""
        everybody = self._roster.all()
        return serving(everybody, model_filter(everybody, self._settings.model))

    def _on_load(self, report: LoadReport) -> None:
        self._cluster.hear_load(report, time.time())
        if self._live is not None:
            self._live.on_load(report)

    def _on_placement(self, update: PlacementUpdate) -> None:
        if self._cluster.hear_placement(update, time.time()):
            self._feed.changed()

    def _on_move(self, update: MigrationUpdate) -> None:
        if self._cluster.hear_migration(update.record, time.time()):
            self._feed.changed()

    def _roster_changed(self, change: RosterChange) -> None:
        self._feed.changed()
        self._cluster.roster_changed(change, time.time())
        num_routers = len(self._roster.of_kind(ServiceKind.ROUTER))
        for presence in change.departed:
            if self._live is not None:
                self._live.on_departed(presence, num_routers_left=num_routers)

    def _readiness(self) -> Readiness:
        services = self._services()
        reasons = obstacles(services)
        if self._served.codec is None:
            reasons.insert(0, "the tokenizer is still loading")
        if self._limit.is_closed:
            reasons.insert(0, "this gateway is shutting down")
        return Readiness(reasons, instances(services))

    def _mesh(self) -> dict[str, Any]:
        now, services = time.time(), self._roster.all()
        status = mesh_status(services, self._cluster.loads, now)
        status["placement"] = placement_document(self._cluster, now)
        names = names_of(services)
        status["migrations"] = [
            move_document(move, names) for move in self._cluster.migrations.latest(SHOWN_MOVES)
        ]
        status["unix_seconds"] = now
        status["loop"] = self._loop.last if self._loop is not None else None
        status["models"] = list(self._served.names)
        status["reasons"] = self._readiness().reasons
        status["num_requests_in_flight"] = self._limit.num_inside
        return status
