"""Spans over several processes; nothing at all where nothing is exported."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.telemetry.traces import configure_traces, end_span, start_span, traceparent_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing = configure_traces("router", "router-0", "ab12", exporter=exporter)
    exporter.flush = tracing.close  # type: ignore[attr-defined] # a handle for the test
    yield exporter
    tracing.close()


def flushed(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    exporter.flush()  # type: ignore[attr-defined] # set by the fixture
    return {s.name: s for s in exporter.get_finished_spans()}


def test_without_an_exporter_the_clients_trace_is_handed_through() -> None:
    with start_span("place", PARENT) as span:
        span.set_attribute("num_tokens", 3)
        assert traceparent_of(span) == PARENT


def test_a_span_is_a_child_of_the_traceparent_it_was_given(exporter: InMemorySpanExporter) -> None:
    end_span(start_span("place", PARENT, num_tokens=3))
    span = flushed(exporter)["place"]
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert format(span.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert dict(span.attributes or {}) == {"num_tokens": 3}
    assert span.resource.attributes["service.name"] == "kvmesh-router"
    assert span.resource.attributes["service.instance.id"] == "ab12"


def test_a_span_is_the_parent_of_what_begins_under_its_traceparent(exporter: InMemorySpanExporter) -> None:
    with start_span("outer") as outer:
        end_span(start_span("inner", traceparent_of(outer)))
    end_span(start_span("later"))
    spans = flushed(exporter)
    assert spans["inner"].parent is not None
    assert spans["inner"].parent.span_id == spans["outer"].context.span_id
    assert spans["later"].parent is None


def test_an_exception_marks_the_span_failed_and_goes_on(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError), start_span("place"):
        raise ValueError("no room")
    status = flushed(exporter)["place"].status
    assert (status.is_ok, status.description) == (False, "ValueError: no room")


def test_ending_twice_is_ending_once(exporter: InMemorySpanExporter) -> None:
    span = start_span("place")
    end_span(span)
    end_span(span, "late")
    assert flushed(exporter)["place"].status.is_unset


def test_a_broken_traceparent_begins_a_new_trace(exporter: InMemorySpanExporter) -> None:
    end_span(start_span("place", "what is this"))
    assert flushed(exporter)["place"].parent is None


class _DeafExporter(SpanExporter):
    """A collector that never answers."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait(30)
        return SpanExportResult.FAILURE


def test_closing_does_not_wait_for_a_deaf_collector() -> None:
    exporter = _DeafExporter()
    tracing = configure_traces("router", "router-0", "ab12", exporter=exporter)
    end_span(start_span("place"))
    begun = time.monotonic()
    tracing.close(timeout_seconds=0.2)
    assert time.monotonic() - begun < 5
    exporter.released.set()


def test_after_closing_spans_do_nothing_again() -> None:
    tracing = configure_traces("router", "router-0", "ab12", exporter=InMemorySpanExporter())
    tracing.close()
    tracing.close()
    assert traceparent_of(start_span("place")) == ""


def test_without_an_endpoint_nothing_is_exported() -> None:
    tracing = configure_traces("router", "router-0", "ab12", endpoint="")
    assert not start_span("place").is_recording()
    tracing.close()
