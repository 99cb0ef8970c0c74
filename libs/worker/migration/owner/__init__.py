"""Modules of this worker's instance that run on other workers, and how they get there and back."""
