"""Links over UCX: a compact, event-driven binding of libucp through ctypes; no compiler needed."""
