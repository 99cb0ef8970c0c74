"""A command that has to wait for a better moment."""


class NotYet(Exception):
    """Raised by a command that changed nothing so far: whoever runs the core runs it again after the next
    step, or after the next commands. No error, and no one outside hears of it."""
