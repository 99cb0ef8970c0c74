"""Modules that move between workers: the way to a host over a Link, the way in for guests, and the moves."""
