"""Which sequences there are, and what the next step computes of them."""
