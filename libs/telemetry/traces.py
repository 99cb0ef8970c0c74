"""Traces over the whole life of a request. Ids travel in message payloads as W3C `traceparent` strings.

Spans are OpenTelemetry's own. Without an exporter they record nothing and hand the `traceparent` they were
given through, so that a client's own trace is not cut. A recorded span costs about 20 us: per request and
phase, never per token.
"""

from threading import Thread

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

AttributeValue = str | bool | int | float

_PROPAGATOR = TraceContextTextMapPropagator()
_EXPORT_TIMEOUT_SECONDS = 5


class Tracing:
    """This process's exporter. `close` sends what is left, within a bound."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("kvmesh") if provider else trace.NoOpTracer()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Flush and stop exporting; what could not be sent in time is lost. Blocks up to the timeout."""
        global _tracing
        if _tracing is self:
            _tracing = Tracing(None)
        if self._provider is None:
            return
        # An exporter that retries against a dead collector does not look at timeouts: leave it behind.
        stopping = Thread(target=self._provider.shutdown, name="traces-flush", daemon=True)
        stopping.start()
        stopping.join(timeout_seconds)
        self._provider = None


_tracing = Tracing(None)


def configure_traces(
    service: str, name: str, incarnation: str, *, endpoint: str = "", exporter: SpanExporter | None = None
) -> Tracing:
    """Export by OTLP/HTTP to `endpoint` (http://host:4318) or to `exporter`; with neither, do nothing."""
    global _tracing
    if endpoint and exporter is None:
        url = endpoint.rstrip("/") + "/v1/traces"
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_SECONDS)
    provider = None
    if exporter is not None:
        attributes = {
            "service.name": f"kvmesh-{service}",
            "service.instance.id": incarnation,
            "kvmesh.name": name,
        }
        provider = TracerProvider(resource=Resource(attributes), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracing = Tracing(provider)
    return _tracing


def start_span(name: str, traceparent: str = "", **attributes: AttributeValue) -> trace.Span:
    """Begin a span under `traceparent`. As a context manager it ends with the block, failed if an exception
    leaves it; else call `end_span`."""
    parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
    return _tracing.tracer.start_span(name, context=parent, attributes=attributes)


def end_span(span: trace.Span, error: str = "") -> None:
    """End it; a non-empty `error` marks it failed. Idempotent."""
    if span.is_recording():
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end()


def traceparent_of(span: trace.Span) -> str:
    """The `traceparent` for messages, so that the receiver's spans become children of this one; "" without
    a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")
