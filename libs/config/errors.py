"""Errors of settings.

SettingsError
├── UnknownSetting   a flag, variable, table or key that nothing knows
├── BadSetting       a known one whose value is not allowed
└── MissingSetting   one without a default and without a value

HelpAsked is no error: `--help` was among the flags.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class SettingsError(Exception):
    """The root; the text says which value, where it came from and what is allowed."""


class UnknownSetting(SettingsError):
    """Names what was given, where, and the nearest name that is known."""

    def __init__(self, given: str, origin: str, known: Iterable[str]) -> None:
        nearest = get_close_matches(given, sorted(known), n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        super().__init__(f"unknown {origin} {given}{hint}")


class BadSetting(SettingsError):
    """Names the origin, the value (hidden where it is a secret) and what is allowed."""

    def __init__(self, origin: str, value: object, allowed: str) -> None:
        super().__init__(f"{origin}: {value!r} is not allowed; expected {allowed}")


class MissingSetting(SettingsError):
    """Nothing gave a value and there is no default."""


class HelpAsked(Exception):
    """Carries the help text."""
