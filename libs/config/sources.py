"""Sources of values: TOML file, environment, flags. Each gives `Given` values by field name."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.config.errors import BadSetting, HelpAsked, SettingsError, UnknownSetting
from libs.config.fields import Setting, variable_of
from libs.config.known import KNOWN_VARIABLES, known_fields, known_tables


@dataclass(frozen=True)
class Given:
    """A value as a person wrote it. `origin` names the flag, variable or file and table."""

    value: Any
    origin: str
    is_text: bool = True
    """Flags and variables are text to be read; TOML has types of its own."""


def from_flags(argv: Sequence[str], settings: Mapping[str, Setting]) -> dict[str, Given]:
    """Read --name value, --name=value, --flag and --no-flag; the last of several wins."""
    given: dict[str, Given] = {}
    words = list(argv)
    by_flag = {s.flag: s for s in settings.values()}
    negations = {"--no-" + flag[2:]: s for flag, s in by_flag.items() if s.is_bool}
    while words:
        flag, has_value, value = words.pop(0).partition("=")
        if flag in ("--help", "-h"):
            raise HelpAsked
        if setting := by_flag.get(flag):
            if not has_value:
                value = "true" if setting.is_bool else _next_value(words, setting)
            given[setting.name] = Given(value, f"flag {flag}")
        elif flag in negations and not has_value:
            given[negations[flag].name] = Given("false", f"flag {flag}")
        elif flag.startswith("-"):
            raise UnknownSetting(flag, "flag", [*by_flag, *negations])
        else:
            raise SettingsError(f"unexpected argument {flag!r}; settings are given as --name value")
    return given


def _next_value(words: list[str], setting: Setting) -> str:
    if not words or words[0].startswith("--"):
        raise BadSetting(f"flag {setting.flag}", "", setting.allowed)
    return words.pop(0)


def from_environment(environ: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Given]:
    """Read KVMESH_<FIELD> and the conventional names. Empty counts as absent: compose files leave such."""
    own = KNOWN_VARIABLES.union(variable_of(name) for name in settings)
    foreign = [v for v in environ if v.startswith("KVMESH_") and v not in own]
    known = own.union(variable_of(name) for name in known_fields()) if foreign else own
    for variable in foreign:
        if variable not in known:
            raise UnknownSetting(variable, "environment variable", known)
    return {
        setting.name: Given(environ[variable], f"environment variable {variable}")
        for setting in settings.values()
        for variable in reversed(setting.variables)
        if environ.get(variable)
    }


def from_file(path: Path, service_name: str, settings: Mapping[str, Setting]) -> dict[str, Given]:
    """Read table [mesh], then the service's own, which goes before it. [mesh] may hold any service's keys."""
    document = _parse(path)
    for table, content in document.items():
        if table not in known_tables() or not isinstance(content, dict):
            raise UnknownSetting(f"[{table}]", f"table of {path}:", [f"[{t}]" for t in known_tables()])
    given: dict[str, Given] = {}
    for table, known in (("mesh", known_fields().union(settings)), (service_name, settings)):
        for key, value in document.get(table, {}).items():
            if key not in known:
                raise UnknownSetting(key, f"key of {path} [{table}]:", known)
            if key in settings:
                given[key] = Given(value, f"{path} [{table}] {key}", is_text=False)
    return given


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
