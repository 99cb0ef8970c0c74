"""The gate of an MLP: `silu(gate) * up`."""
