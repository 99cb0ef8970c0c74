"""A settings struct read as a list of settings: name, flag, variable, default, allowed values, meaning."""

import types
from dataclasses import dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin

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
    is_required: bool
    is_bool: bool
    is_list: bool
    is_secret: bool

    @property
    def flag(self) -> str:
        """--max-model-len."""
        return flag_of(self.name)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables, the strongest first."""
        own = (variable_of(self.name),)
        conventional = CONVENTIONAL_VARIABLES.get(self.name)
        return (*own, conventional) if conventional else own


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
    meta, shape = _unwrap(inspect.type_info(field.type))
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Setting(
        name=field.name,
        annotation=field.type,
        description=str((meta.extra_json_schema or {}).get("description", "")) if meta else "",
        allowed=_allowed(shape),
        default=default,
        is_required=default is msgspec.NODEFAULT,
        is_bool=_is_bool(field.type),
        is_list=isinstance(_without_none(shape), inspect.VarTupleType | inspect.ListType),
        is_secret=bool((meta.extra or {}).get("secret")) if meta else False,
    )


def _unwrap(shape: inspect.Type) -> tuple[inspect.Metadata | None, inspect.Type]:
    return (shape, shape.type) if isinstance(shape, inspect.Metadata) else (None, shape)


def _without_none(shape: inspect.Type) -> inspect.Type:
    if isinstance(shape, inspect.UnionType):
        rest = [t for t in shape.types if not isinstance(t, inspect.NoneType)]
        return _unwrap(rest[0])[1] if len(rest) == 1 else shape
    return shape


def _is_bool(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return all(_is_bool(a) or a is type(None) for a in get_args(annotation))
    metadata, shape = _unwrap(inspect.type_info(annotation))
    del metadata
    return isinstance(shape, inspect.BoolType)


def _allowed(shape: inspect.Type) -> str:
    """What a person may write, in words."""
    _, shape = _unwrap(shape)
    match shape:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(shape)
        case inspect.FloatType():
            return "a number" + _bounds(shape)
        case inspect.LiteralType():
            return "one of " + ", ".join(str(v) for v in shape.values)
        case inspect.EnumType():
            return "one of " + ", ".join(str(_value(member)) for member in shape.cls)
        case inspect.VarTupleType() | inspect.ListType():
            return f"a comma list, each {_allowed(shape.item_type)}"
        case inspect.UnionType():
            return " or ".join(_allowed(t) for t in shape.types)
        case inspect.NoneType():
            return "none"
        case inspect.StrType():
            return "text" + _lengths(shape)
        case _:
            return "text"


def _value(member: Enum) -> object:
    return member.value


def _bounds(shape: inspect.IntType | inspect.FloatType) -> str:
    bounds = [(">=", shape.ge), (">", shape.gt), ("<=", shape.le), ("<", shape.lt)]
    told = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    return " " + " and ".join(told) if told else ""


def _lengths(shape: inspect.StrType) -> str:
    told = [f"at least {shape.min_length} characters"] if shape.min_length else []
    told += [f"at most {shape.max_length} characters"] if shape.max_length else []
    told += [f"the form {shape.pattern}"] if shape.pattern else []
    return " of " + ", ".join(told) if told else ""
