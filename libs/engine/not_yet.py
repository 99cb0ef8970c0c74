"""A command that has to wait for a better moment."""


class NotYet(Exception):
    """Raised by a command that can be run again: whoever runs the core does so after the next step, or after
    the next commands. No error, and no one outside hears of it."""
