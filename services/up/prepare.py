"""From the command line to a plan that can be started: everything is checked before anything runs."""

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import msgspec

from libs.bus.messages.presence import ServiceKind
from libs.config.fields import flag_of, variable_of
from libs.config.known import known_fields
from libs.config.load import load_settings
from libs.mesh.workers import WORKERS
from libs.runtime.connect import check_url
from libs.runtime.signals import PARENT_VARIABLE
from services.up.admin_key import VARIABLE as ADMIN_KEY_VARIABLE
from services.up.admin_key import settle_admin_key
from services.up.plan import Child, children_environment, plan_children, share_threads
from services.up.preflight import check_model, check_port, check_settings, lock_state_dir
from services.up.settings import UpSettings


@dataclass(frozen=True)
class Prepared:
    """A mesh that can be started. The state folder is ours until `lock` is closed."""

    settings: UpSettings
    port: int
    children: list[Child]
    environ: dict[str, str]
    """Of the children, but for the broker's address and what is one child's alone."""
    needs_key: bool
    """Whether the gateway wants an API key."""
    state_dir: Path
    lock: TextIO


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> Prepared:
    """Raises SettingsError, HelpAsked, NotStartable."""
    own_argv, passed_on = split_flags(argv, UpSettings.__struct_fields__, known_fields())
    settings = load_settings(UpSettings, own_argv, {**environ, **passed_on}, "up")
    if settings.nats_server:
        check_url(settings.nats_server)
    state_dir = Path(settings.state_dir).expanduser().absolute()
    settings = msgspec.structs.replace(settings, state_dir=str(state_dir))
    childrens = {
        **environ,
        **children_environment(settings, environ, passed_on, secret=secrets.token_hex(16)),
        PARENT_VARIABLE: str(os.getpid()),
    }
    read = check_settings(plan_children(settings, port=settings.port), childrens, passed_on)
    check_model(settings.model)
    lock = lock_state_dir(state_dir)
    try:
        port = check_port(settings.host, settings.port)
        admin_key = settle_admin_key(state_dir, getattr(read["gateway"], "admin_key", ""))
    except BaseException:
        lock.close()
        raise
    childrens.pop(ADMIN_KEY_VARIABLE, None)
    threads = settings.threads or share_threads(_num_cores(), settings.prefill + settings.decode)
    children = [
        with_admin_key(with_threads(child, read[child.name], threads), admin_key)
        for child in plan_children(settings, port=port)
    ]
    needs_key = bool(getattr(read["gateway"], "api_key", ""))
    return Prepared(settings, port, children, childrens, needs_key, state_dir, lock)


def split_flags(
    argv: Sequence[str], own: Collection[str], services: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Words for `up` itself, and variables for the services, by field names of each.

    A service's flag without a value is a switch: `--eager` becomes "true" and `--no-eager` "false". Words
    that nobody knows stay with `up`, which refuses them with the nearest name it knows.
    """
    own_words: list[str] = []
    variables: dict[str, str] = {}
    foreign = {flag_of(field): field for field in services if field not in own}
    negations = {"--no-" + flag[2:]: field for flag, field in foreign.items()}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in foreign:
            if not has_value:
                value = words.pop(0) if words and not words[0].startswith("--") else "true"
            variables[variable_of(foreign[flag])] = value
        elif flag in negations and not has_value:
            variables[variable_of(negations[flag])] = "false"
        else:
            own_words.append(word)
    return own_words, variables


def _num_cores() -> int:
    """Cores that this process may use: fewer than the machine has under a cpuset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_threads(child: Child, read: msgspec.Struct, threads: int) -> Child:
    """A worker whose own settings name no number of threads gets its share of the cores."""
    if child.kind not in WORKERS or getattr(read, "threads", True):
        return child
    return replace(child, flags=(*child.flags, "--threads", str(threads)))


def with_admin_key(child: Child, key: str) -> Child:
    """The gateway gets the key, and nobody else: a flag could be read by everybody on this machine."""
    if child.kind is not ServiceKind.GATEWAY:
        return child
    return replace(child, environ={ADMIN_KEY_VARIABLE: key})
