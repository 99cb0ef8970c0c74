"""compose.yaml names every program, with flags and variables that they understand."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import services
from libs.bus.messages.presence import ServiceKind
from libs.config.load import load_settings
from services.up.preflight import settings_type

ROOT = Path(next(iter(services.__path__))).parent
PROGRAMS = [kind.value for kind in ServiceKind]


def substituted(text: str) -> str:
    """As compose does it where nothing is set: ${NAME:-default}."""
    return re.sub(r"\$\{\w+(?::-([^}]*))?\}", lambda found: found.group(1) or "", text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(substituted((ROOT / "compose.yaml").read_text())))


@pytest.fixture(scope="module")
def image_environment() -> dict[str, str]:
    dockerfile = (ROOT / "deploy/image/Dockerfile").read_text()
    return dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", dockerfile))


def test_every_program_of_the_mesh_and_the_broker_are_there(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"nats", *PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_accepts_its_flags_and_variables(
    compose: dict[str, Any], image_environment: dict[str, str], program: str
) -> None:
    service = compose["services"][program]
    name, *flags = service["command"]
    environ = {k: str(v or "") for k, v in service["environment"].items()}
    settings: Any = load_settings(
        settings_type(ServiceKind(name)), flags, {**image_environment, **environ}, program
    )
    assert name == program
    assert settings.nats_server == "nats://nats:4222"
    assert settings.link_secret
    assert settings.probe_port == 9100
    assert settings.drain_timeout_seconds < int(service["stop_grace_period"].removesuffix("s"))


def test_the_probes_asked_are_where_they_listen(compose: dict[str, Any]) -> None:
    for program in PROGRAMS:
        port = 8000 if program == "gateway" else 9100
        assert f"http://127.0.0.1:{port}/ready" in compose["services"][program]["healthcheck"]["test"][-1]


def test_only_the_gateway_is_reachable_from_outside_and_by_default_only_from_this_machine(
    compose: dict[str, Any],
) -> None:
    assert compose["services"]["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    assert [name for name, service in compose["services"].items() if "ports" in service] == ["gateway"]


def test_the_image_runs_as_nobody_special_and_holds_what_it_copies() -> None:
    dockerfile = (ROOT / "deploy/image/Dockerfile").read_text()
    assert "USER kvmesh" in dockerfile
    ignored = (ROOT / "deploy/image/Dockerfile.dockerignore").read_text().splitlines()
    for sources in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored
    assert os.access(ROOT / "deploy/image/entrypoint", os.X_OK)
