"""What must hold before anything is started; each failure is one line for a person."""

import fcntl
import importlib
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TextIO

import msgspec

from libs.bus.messages.presence import ServiceKind
from libs.config.errors import SettingsError
from libs.config.fields import flag_of
from libs.config.load import load_settings
from libs.model.errors import ModelError
from libs.model.source import find_model
from services.up.plan import Child


class NotStartable(Exception):
    """Why the mesh cannot be started; the text is one line that says what to do."""


def check_port(host: str, port: int) -> int:
    """The port to listen on: this one if it is free, any free one for 0. Raises NotStartable."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise NotStartable(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error


def check_model(name: str) -> None:
    """Whether the weights are there. Raises NotStartable."""
    try:
        find_model(name)
    except ModelError as error:
        raise NotStartable(str(error)) from error


def check_settings(
    children: list[Child], environ: Mapping[str, str], passed_on: Collection[str]
) -> dict[str, msgspec.Struct]:
    """What each child would read, by its name, with the very code that it will use.

    `passed_on` names the variables that were flags of `up`. Raises NotStartable.
    """
    read: dict[str, msgspec.Struct] = {}
    for child in children:
        try:
            read[child.name] = load_settings(
                settings_type(child.kind), child.flags, environ, child.kind.value
            )
        except SettingsError as error:
            raise NotStartable(f"{child.name}: {_as_flags(str(error), passed_on)}") from error
    return read


def _as_flags(said: str, passed_on: Collection[str]) -> str:
    """An error about a variable that a person wrote as a flag, told as one about the flag."""
    for variable in passed_on:
        flag = flag_of(variable.removeprefix("KVMESH_").lower())
        said = said.replace(f"environment variable {variable}:", f"flag {flag}:")
    return said


def settings_type(kind: ServiceKind) -> type[msgspec.Struct]:
    """A service's settings struct, found by module name as its program is: `up` imports no service."""
    module = importlib.import_module(f"services.{kind.value}.settings")
    for member in vars(module).values():
        if (
            isinstance(member, type)
            and member.__module__ == module.__name__
            and issubclass(member, msgspec.Struct)
        ):
            return member
    raise NotStartable(f"{module.__name__} holds no settings")


def lock_state_dir(state_dir: Path) -> TextIO:
    """Make the folder and hold it until the file returned is closed. Raises NotStartable."""
    try:
        (state_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise NotStartable(f"cannot use the state folder {state_dir}: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise NotStartable(
            f"the state folder {state_dir} is in use by process {holder}; choose another --state-dir"
        ) from None
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
