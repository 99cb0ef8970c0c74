"""Products with weights that never change: `x @ weight.T`, and the gated pair of an MLP."""
