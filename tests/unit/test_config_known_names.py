"""The known names are those that the services really have."""

import importlib
import re
from pathlib import Path

import msgspec
import pytest

import services
from libs.config.fields import settings_of
from libs.config.known import KNOWN_VARIABLES, known_fields, known_tables
from libs.runtime.signals import PARENT_VARIABLE

PROGRAMS = sorted(p.parent.name for p in Path(next(iter(services.__path__))).glob("*/settings.py"))


def settings_structs(program: str) -> list[type[msgspec.Struct]]:
    module = importlib.import_module(f"services.{program}.settings")
    members = [m for m in vars(module).values() if isinstance(m, type) and issubclass(m, msgspec.Struct)]
    return [m for m in members if m.__module__ == module.__name__]


def test_the_settings_of_all_services_and_no_others_are_known() -> None:
    structs = [struct for program in PROGRAMS for struct in settings_structs(program)]
    assert len(structs) == len(PROGRAMS)
    assert known_fields() == {"config"}.union(*(struct.__struct_fields__ for struct in structs))
    assert {"mesh", *PROGRAMS} <= known_tables()


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_says_what_it_means(program: str) -> None:
    (struct,) = settings_structs(program)
    assert [s.name for s in settings_of(struct).values() if not s.description] == []


def test_every_variable_that_the_source_names_is_known() -> None:
    root = Path(next(iter(services.__path__))).parent
    sources = [p for folder in ("services", "libs", "kernels") for p in (root / folder).rglob("*.py")]
    named = {name for p in sources for name in re.findall(r"KVMESH_[A-Z0-9_]*[A-Z0-9]", p.read_text())}
    fields = {"KVMESH_" + field.upper() for field in known_fields()}
    assert named - fields - KNOWN_VARIABLES == set()


def test_what_programs_pass_to_their_children_is_no_unknown_variable() -> None:
    assert PARENT_VARIABLE in KNOWN_VARIABLES
