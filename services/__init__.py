"""One folder = one program, run as python -m services.NAME; no service imports another."""
