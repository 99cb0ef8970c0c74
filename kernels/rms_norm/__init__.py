"""RMS norm over the last dim, alone or after adding a residual."""
