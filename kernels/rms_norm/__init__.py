"""RMS norm over the last dim."""
