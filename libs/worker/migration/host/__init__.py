"""Modules of other workers' instances that run here."""
