"""One request is one trace: router, prefill and decode each add a span under the one they were given."""

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from workers_mesh import prompt_of, running_mesh

from libs.request.generation import Generation
from libs.telemetry.traces import configure_traces

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def test_router_prefill_and_decode_report_their_part_under_the_gateways_trace() -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_traces(service="test", name="test", incarnation="test", exporter=exporter)
    async with running_mesh() as mesh:
        gateway = await mesh.gateway()
        for start in (mesh.router(), mesh.prefill(), mesh.decode()):
            await start
        plain = gateway.generation(prompt_of(20))
        fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
        generation = Generation(**fields | {"traceparent": PARENT})
        await (await gateway.begin(generation)).end()
        await mesh.until_idle()
    tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans() if span.context}
    assert set(spans) == {"router.place", "prefill", "decode"}
    for span in spans.values():
        assert span.context is not None
        assert format(span.context.trace_id, "032x") == TRACE
        assert dict(span.attributes or {})["request_id"] == generation.request_id
    assert dict(spans["decode"].attributes or {})["outcome"] == "length"
    assert dict(spans["prefill"].attributes or {})["outcome"] == "handed_over"
    assert dict(spans["router.place"].attributes or {})["outcome"] == "placed"
