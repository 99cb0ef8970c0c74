"""Moves tensors between processes: one Link, several ways."""
