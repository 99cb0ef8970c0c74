"""Every name that some program knows: a slip of the keyboard in what all share is an error in each of them.

A program knows its own settings from its struct. Others' variables lie in the environment that all share, and
their keys in the [mesh] table of the file that all read. As no program imports another, their names are read
from the source of their settings, and only when a name turns up that is not the program's own.
"""

import ast
from functools import cache
from pathlib import Path

KNOWN_VARIABLES = frozenset({"KVMESH_PARENT_PID", "KVMESH_UCX_LIBRARY", "KVMESH_URL"})
"""KVMESH_* variables that are no settings: of `up` for its children, of the transport, of the CLI."""

_ROOT = Path(__file__).parents[2]


@cache
def known_fields() -> frozenset[str]:
    """The fields of all settings structs, and `config`."""
    shared = (_ROOT / "libs/runtime/settings.py", *_ROOT.glob("libs/worker/**/settings.py"))
    files = (*shared, *_ROOT.glob("services/*/settings.py"))
    trees = [ast.parse(path.read_bytes()) for path in files]
    structs = [n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef) and n.keywords]
    fields = [n.target for struct in structs for n in struct.body if isinstance(n, ast.AnnAssign)]
    return frozenset({"config", *(target.id for target in fields if isinstance(target, ast.Name))})


@cache
def known_tables() -> frozenset[str]:
    """The tables of a settings file: [mesh] for all, and one per program."""
    programs = [path.parent.name for path in _ROOT.glob("services/*/__main__.py")]
    return frozenset({"mesh", "simulator", *programs})
