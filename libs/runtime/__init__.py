"""How a service lives: open, ready, serve, drain, close; and how others see it."""
