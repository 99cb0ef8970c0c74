"""Reading settings: defaults < TOML file < environment < flags."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from libs.config.closed_stdout import tolerate_closed_stdout
from libs.config.errors import BadSetting, HelpAsked, MissingSetting, SettingsError
from libs.config.fields import Setting, settings_of
from libs.config.help import help_text
from libs.config.sources import Given, from_environment, from_file, from_flags

EXIT_BAD_SETTINGS = 2

S = TypeVar("S", bound=msgspec.Struct)


class _FileSettings(msgspec.Struct):
    config: Annotated[
        str, Meta(description="TOML file: table [mesh] for all services, one table per service")
    ] = ""


CONFIG = replace(settings_of(_FileSettings)["config"], allowed="the path of a TOML file")


def load_settings(
    settings_type: type[S], argv: Sequence[str], environ: Mapping[str, str], service_name: str
) -> S:
    """Settings of one service. `argv` is without the program's name.

    Raises SettingsError (its text is one line for a person) and HelpAsked (carrying the help text).
    """
    settings = settings_of(settings_type)
    readable = {**settings, "config": CONFIG}
    try:
        flags = from_flags(argv, readable)
    except HelpAsked:
        raise HelpAsked(help_text(service_name, settings_type.__doc__ or "", readable.values())) from None
    variables = from_environment(environ, readable)
    merged: dict[str, Given] = {}
    if config := flags.get("config") or variables.get("config"):
        merged |= from_file(Path(config.value).expanduser(), service_name, settings)
    merged |= variables | flags
    values = {name: read_value(settings[name], given) for name, given in merged.items() if name in settings}
    for setting in settings.values():
        if setting.is_required and setting.name not in values:
            raise MissingSetting(
                f"{setting.flag} (or {setting.variables[0]}) is needed: {setting.description}"
            )
    return settings_type(**values)


def read_value(setting: Setting, given: Given) -> Any:
    """The typed value of one setting. Raises BadSetting."""
    value: Any = given.value
    if given.is_text and setting.is_list:
        value = [item.strip() for item in value.split(",") if item.strip()]
    try:
        typed = msgspec.convert(value, setting.annotation, strict=not given.is_text)
    except msgspec.ValidationError as error:
        raise BadSetting(
            given.origin, "***" if setting.is_secret else given.value, setting.allowed
        ) from error
    if isinstance(typed, float) and not math.isfinite(typed):
        raise BadSetting(given.origin, given.value, setting.allowed)
    return typed


def load_settings_or_exit(
    settings_type: type[S],
    service_name: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> S:
    """As `load_settings`, for this process: ends it with 0 after --help and with 2 and one line on errors."""
    try:
        return load_settings(
            settings_type,
            sys.argv[1:] if argv is None else argv,
            os.environ if environ is None else environ,
            service_name,
        )
    except HelpAsked as help_asked:
        with tolerate_closed_stdout():
            print(help_asked)
        raise SystemExit(0) from None
    except SettingsError as error:
        exit_for(error, service_name)


def exit_for(error: SettingsError, service_name: str) -> NoReturn:
    """End the process with one line and exit code 2."""
    print(f"{service_name}: {error}", file=sys.stderr)
    raise SystemExit(EXIT_BAD_SETTINGS) from None
