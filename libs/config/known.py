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
        "access_trace",
        "access_trace_mib",
        "api_key",
        "block_size",
        "config",
        "connect_timeout_seconds",
        "decode",
        "device",
        "disk_gib",
        "disk_path",
        "drain_timeout_seconds",
        "dtype",
        "eviction",
        "fetch_bytes_per_second",
        "flush_timeout_seconds",
        "fsync",
        "host",
        "index_cache_mib",
        "index_path",
        "kv_memory_gib",
        "lease_seconds",
        "link_host",
        "link_secret",
        "log_format",
        "log_level",
        "max_attempts",
        "max_body_bytes",
        "max_buffered_bytes",
        "max_concurrent_requests",
        "max_expected_output_tokens",
        "max_held",
        "max_known_blocks",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_queue",
        "max_unsent_deltas",
        "max_waiting",
        "max_waiting_tokens",
        "memory_gib",
        "model",
        "name",
        "nats_server",
        "no_workers_grace_seconds",
        "num_blocks",
        "otel_exporter_otlp_endpoint",
        "policy",
        "port",
        "prefill",
        "probe_host",
        "probe_port",
        "replay",
        "replay_patience_seconds",
        "request_timeout_seconds",
        "role",
        "routers",
        "send_timeout_seconds",
        "served_model_name",
        "session_stickiness_seconds",
        "stale_after_seconds",
        "starting_grace_seconds",
        "state_dir",
        "store_fetch_timeout_seconds",
        "store_fetch_when",
        "store_find_timeout_seconds",
        "store_finished",
        "store_put_mib",
        "stores",
        "threads",
        "transport",
        "ttl_seconds",
        "write_policy",
    }
)

KNOWN_VARIABLES = frozenset({"KVMESH_PARENT_PID", "KVMESH_UCX_LIBRARY", "KVMESH_URL"})
"""KVMESH_* variables that are no settings: of `up` for its children, of the transport, of the CLI."""
