"""What this machine reaches, and what others reach on it: every number with its ratio."""
