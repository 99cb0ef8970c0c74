"""Starts everything on one machine by module name."""
