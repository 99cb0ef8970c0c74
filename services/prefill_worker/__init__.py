"""Runs prompts in chunks; hands KV over layer by layer as it is made."""
