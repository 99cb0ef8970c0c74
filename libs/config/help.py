"""The text of --help: every setting with its default, its variable, what is allowed and what it means."""

import textwrap
from collections.abc import Iterable

from libs.config.fields import Setting

_WIDTH = 100


def help_text(program: str, summary: str, settings: Iterable[Setting]) -> str:
    """Plain text; `summary` is the docstring of the settings struct."""
    lines = [f"{program}: {summary.strip().splitlines()[0] if summary.strip() else 'settings'}", ""]
    lines += ["Later wins: defaults, TOML file, environment, flags.", ""]
    for setting in settings:
        lines += _entry(setting)
    lines += ["  --help", "      this text"]
    return "\n".join(lines)


def _entry(setting: Setting) -> list[str]:
    flag = f"{setting.flag}, --no-{setting.flag[2:]}" if setting.is_bool else f"{setting.flag} VALUE"
    facts = [setting.allowed, "required" if setting.is_required else f"default {_default(setting)}"]
    facts.append(", ".join(setting.variables))
    text = setting.description or setting.name.replace("_", " ")
    wrapped = textwrap.wrap(text, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return [f"  {flag}", *wrapped, f"      [{'; '.join(facts)}]", ""]


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value in ("", (), []):
        return "none"
    if isinstance(value, tuple | list):
        return ",".join(str(one) for one in value)
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))
