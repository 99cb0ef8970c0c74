"""Watches load, decides which module goes where, orders the moves and remembers them."""
