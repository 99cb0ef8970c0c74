"""Prompts: run through the engine in order of arrival, their KV sent to decode workers as it is made."""
