"""Block names, block layout, prefix tree: pure, no I/O."""
