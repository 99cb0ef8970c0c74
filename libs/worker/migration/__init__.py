"""Modules that run on other workers than their owner: protocol, the owner's side, the host's side."""
