"""Rotary position embedding applied to queries and keys in place."""
