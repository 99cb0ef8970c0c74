"""Every name that some service knows, in one place, so that a slip of the keyboard is an error everywhere.

A service knows its own settings from its struct. What other services know stands here: their variables lie in
the environment that all share, and their keys in the [mesh] table of the file that all read.
A unit test walks all services' settings and says what to add.
"""

KNOWN_TABLES = frozenset(
    {"mesh", "gateway", "router", "prefill_worker", "decode_worker", "kv_store", "up", "cli", "bench"}
)

KNOWN_FIELDS = frozenset(
    {
        "config",
        "decode",
        "drain_timeout_seconds",
        "host",
        "link_secret",
        "log_format",
        "log_level",
        "model",
        "name",
        "nats_server",
        "otel_exporter_otlp_endpoint",
        "port",
        "prefill",
        "probe_host",
        "probe_port",
        "state_dir",
        "threads",
    }
)

KNOWN_VARIABLES = frozenset({"KVMESH_PARENT_PID"})
"""KVMESH_* variables that are no settings: programs pass them to their children."""
