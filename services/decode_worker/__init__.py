"""Adopts KV, batches continuously, streams tokens, gives blocks back."""
