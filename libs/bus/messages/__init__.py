"""All messages, grouped by conversation."""
