"""The global KV tier."""
