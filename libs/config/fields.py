"""A settings struct read as a list of settings: name, flag, variable, default, allowed values, meaning."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

CONVENTIONAL_VARIABLES = {
    "nats_server": "NATS_SERVER",
    "otel_exporter_otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "hf_home": "HF_HOME",
}
"""Names that users bring along; KVMESH_<FIELD> still goes before them."""


@dataclass(frozen=True)
class Setting:
    """One field of a settings struct. `annotation` is what msgspec converts to."""

    name: str
    annotation: Any
    description: str
    allowed: str
    default: Any
    is_bool: bool
    is_list: bool
    is_secret: bool

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.default is msgspec.NODEFAULT

    @property
    def flag(self) -> str:
        """--max-model-len."""
        return flag_of(self.name)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables, the strongest first."""
        conventional = CONVENTIONAL_VARIABLES.get(self.name)
        return (variable_of(self.name), *([conventional] if conventional else []))


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a field."""
    return "KVMESH_" + name.upper()


def settings_of(settings_type: type[msgspec.Struct]) -> dict[str, Setting]:
    """The settings of a struct by field name, in order of declaration."""
    return {field.name: _setting(field) for field in msgspec.structs.fields(settings_type)}


def _setting(field: msgspec.structs.FieldInfo) -> Setting:
    shape = inspect.type_info(field.type)
    meta = shape if isinstance(shape, inspect.Metadata) else inspect.Metadata(shape)
    has_factory = field.default_factory is not msgspec.NODEFAULT
    shapes = _alternatives(shape)
    return Setting(
        name=field.name,
        annotation=field.type,
        description=str((meta.extra_json_schema or {}).get("description", "")),
        allowed=" or ".join(_allowed(one) for one in shapes) + (" or none" if _takes_none(shape) else ""),
        default=field.default_factory() if has_factory else field.default,
        is_bool=all(isinstance(one, inspect.BoolType) for one in shapes),
        is_list=all(isinstance(one, inspect.VarTupleType | inspect.ListType) for one in shapes),
        is_secret=bool((meta.extra or {}).get("secret")),
    )


def _alternatives(shape: inspect.Type) -> list[inspect.Type]:
    """The types of a field without None, each without its metadata."""
    shape = shape.type if isinstance(shape, inspect.Metadata) else shape
    if not isinstance(shape, inspect.UnionType):
        return [] if isinstance(shape, inspect.NoneType) else [shape]
    return [alternative for one in shape.types for alternative in _alternatives(one)]


def _takes_none(shape: inspect.Type) -> bool:
    shape = shape.type if isinstance(shape, inspect.Metadata) else shape
    return isinstance(shape, inspect.UnionType) and shape.includes_none


def _allowed(shape: inspect.Type) -> str:
    """The allowed values, in words."""
    match shape:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(shape)
        case inspect.FloatType():
            return "a number" + _bounds(shape)
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in shape.values)
        case inspect.EnumType():
            return "one of " + ", ".join(str(member.value) for member in shape.cls)
        case inspect.VarTupleType() | inspect.ListType():
            return f"a comma list, each {' or '.join(map(_allowed, _alternatives(shape.item_type)))}"
        case inspect.StrType():
            return "text" + _lengths(shape)
        case _:
            return "text"


def _bounds(shape: inspect.IntType | inspect.FloatType) -> str:
    bounds = [(">=", shape.ge), (">", shape.gt), ("<=", shape.le), ("<", shape.lt)]
    told = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    return " " + " and ".join(told) if told else ""


def _lengths(shape: inspect.StrType) -> str:
    told = [f"at least {shape.min_length} characters"] if shape.min_length else []
    told += [f"at most {shape.max_length} characters"] if shape.max_length else []
    told += [f"the form {shape.pattern}"] if shape.pattern else []
    return " of " + ", ".join(told) if told else ""
