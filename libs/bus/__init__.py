"""Typed messages by conversation, over NATS or in memory."""
