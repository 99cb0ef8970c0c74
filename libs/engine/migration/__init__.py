"""Modules of this instance that move to other workers, and back."""
