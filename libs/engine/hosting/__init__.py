"""Modules of other workers' instances that run here, and the way to those of ours that run elsewhere."""
