"""OpenAI-compatible HTTP and SSE; each request's one terminal outcome."""
