"""From logits to the next token of each sequence."""
