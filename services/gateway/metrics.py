"""All metrics of the gateway: name, help, unit, labels."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.telemetry.metrics import SECONDS_BUCKETS, TOKEN_SECONDS_BUCKETS


@dataclass(slots=True)
class Times:
    """Monotonic seconds of what a sequence went through; the prefill's start is by the worker's clock."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    prefill_started_unix: float = 0.0


class GatewayMetrics:
    """Declared once per process, in the registry of its runtime."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvmesh_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"kvmesh_{name}", text, registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
            return Histogram(f"kvmesh_{name}_seconds", text, buckets=buckets, registry=registry)

        self.http_requests = counter("http_requests_total", "HTTP responses begun.", "path", "status")
        self.http_requests_in_flight = gauge("http_requests_in_flight", "Generating requests held now.")
        self.num_requests_running = gauge("num_requests_running", "Sequences that got their first token.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Sequences without a token yet.")
        self.prompt_tokens = counter("prompt_tokens_total", "Tokens of the prompts admitted.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens generated.")
        self.cached_tokens = counter("prompt_tokens_cached_total", "Prompt tokens whose KV was found.")
        self.request_success = counter(
            "request_success_total", "Sequences that came to their own end.", "finished_reason"
        )
        self.request_failure = counter(
            "request_failure_total", "Sequences refused, aborted or failed, by reason.", "reason"
        )
        self.readmissions = counter("request_readmissions_total", "Attempts placed again.", "cause")
        self.stale_deltas = counter("stale_deltas_total", "Deltas of sequences that nobody waits for.")
        self.mesh_viewers = gauge("mesh_viewers", "Who follows the mesh by its events now.")
        self.slow_clients = counter("slow_clients_total", "Streams ended because the client did not read.")
        self.time_to_first_token = seconds("time_to_first_token", "From arrival to the first token.")
        self.inter_token_latency = seconds(
            "inter_token_latency", "Between two tokens of a sequence.", TOKEN_SECONDS_BUCKETS
        )
        self.e2e_request_latency = seconds("e2e_request_latency", "From arrival to the end of a sequence.")
        self.request_queue_time = seconds("request_queue_time", "From arrival to the start of the prefill.")
        self.request_prefill_time = seconds("request_prefill_time", "From prefill start to first token.")
        self.request_decode_time = seconds("request_decode_time", "From the first to the last token.")

    def watch(
        self, num_waiting: Callable[[], int], num_live: Callable[[], int], num_requests: Callable[[], int]
    ) -> None:
        """Read the gauges when somebody scrapes."""
        self.num_requests_waiting.set_function(num_waiting)
        self.num_requests_running.set_function(lambda: num_live() - num_waiting())
        self.http_requests_in_flight.set_function(num_requests)

    def note_tokens(self, times: Times, num_new: int, last: float | None, num_cached: int) -> None:
        """`num_new` tokens of a sequence came, the last at `times.last_token`; those before at `last`."""
        now = times.last_token or times.arrived
        self.generation_tokens.inc(num_new)
        if last is not None:
            self.inter_token_latency.observe((now - last) / num_new)
            return
        self.time_to_first_token.observe(now - times.arrived)
        if num_cached:
            self.cached_tokens.inc(num_cached)

    def note_end(self, times: Times, now: float, now_unix: float) -> None:
        """A sequence has its outcome."""
        self.e2e_request_latency.observe(now - times.arrived)
        if times.first_token is None or times.last_token is None:
            return
        self.request_decode_time.observe(times.last_token - times.first_token)
        if times.prefill_started_unix:
            # The worker's clock is another one: what it says is kept between arrival and first token.
            started = times.prefill_started_unix - now_unix + now
            started = min(max(started, times.arrived), times.first_token)
            self.request_queue_time.observe(started - times.arrived)
            self.request_prefill_time.observe(times.first_token - started)
