"""Model families, weights, tokeniser, chat template."""
