"""The HTTP side: paths, keys, bodies, errors, and one shape for them all."""
