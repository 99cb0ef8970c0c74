"""What is wrong is said in one line before anything starts."""

import os
import socket
from pathlib import Path

import pytest

from libs.bus.messages.presence import ServiceKind
from libs.config.errors import SettingsError
from libs.runtime.state_dir import default_state_dir
from services.up.plan import Child
from services.up.preflight import (
    NotStartable,
    check_model,
    check_port,
    check_settings,
    lock_state_dir,
    settings_type,
)
from services.up.prepare import prepare
from services.up.settings import UpSettings


def test_a_free_port_is_taken_as_it_is_and_0_means_any() -> None:
    port = check_port("127.0.0.1", 0)
    assert port > 0
    assert check_port("127.0.0.1", port) == port


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NotStartable, match=f"127.0.0.1:{port}: .*choose another --port"):
            check_port("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(NotStartable, match=r"no-such-host\.invalid"):
        check_port("no-such-host.invalid", 0)


def test_a_state_folder_is_held_by_one_until_it_lets_go(tmp_path: Path) -> None:
    held = lock_state_dir(tmp_path / "state")
    with pytest.raises(NotStartable, match=f"in use by process {os.getpid()}; choose another --state-dir"):
        lock_state_dir(tmp_path / "state")
    held.close()
    lock_state_dir(tmp_path / "state").close()


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotStartable, match="cannot use the state folder"):
        lock_state_dir(tmp_path / "file" / "state")


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(NotStartable, match="no-such-model"):
        check_model("no-such-model")


@pytest.mark.parametrize("kind", list(ServiceKind))
def test_every_program_has_settings_to_check(kind: ServiceKind) -> None:
    assert settings_type(kind).__module__ == f"services.{kind.value}.settings"


def test_what_a_service_would_refuse_is_refused_first_and_told_as_it_was_written() -> None:
    router = Child("router", ServiceKind.ROUTER)
    environ = {"KVMESH_POLICY": "dice"}
    with pytest.raises(NotStartable, match="router: flag --policy: 'dice' is not allowed; expected one of"):
        check_settings([router], environ, passed_on=["KVMESH_POLICY"])
    with pytest.raises(NotStartable, match="router: environment variable KVMESH_POLICY: 'dice'"):
        check_settings([router], environ, passed_on=[])


def test_the_state_folder_is_where_the_desktop_standard_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert default_state_dir() == UpSettings().state_dir == "/var/state/kvmesh"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_state_dir().endswith("/.local/state/kvmesh")


def test_a_prepared_mesh_has_its_folder_its_port_and_the_settings_of_its_children(tmp_path: Path) -> None:
    flags = ["--state-dir", str(tmp_path / "s"), "--port", "0", "--decode", "2", "--dtype", "float32"]
    prepared = prepare([*flags, "--api-key", "k"], {"HOME": "/home/x"})
    try:
        assert prepared.port > 0
        assert prepared.needs_key
        assert [c.name for c in prepared.children][-2:] == ["decode-0", "decode-1"]
        assert prepared.children[0].flags == ("--host", "127.0.0.1", "--port", str(prepared.port))
        threads = [
            c.flags[c.flags.index("--threads") + 1] for c in prepared.children if "--threads" in c.flags
        ]
        assert len(threads) == 3
        assert prepared.environ["KVMESH_DTYPE"] == "float32"
        assert prepared.environ["KVMESH_PARENT_PID"] == str(os.getpid())
        assert len(prepared.environ["KVMESH_LINK_SECRET"]) >= 32
        assert prepared.environ["HOME"] == "/home/x"
    finally:
        prepared.lock.close()


def test_threads_that_a_file_gives_a_worker_are_left_alone(tmp_path: Path) -> None:
    config = tmp_path / "k.toml"
    config.write_text("[prefill_worker]\nthreads = 3\n")
    prepared = prepare(["--state-dir", str(tmp_path / "s"), "--port", "0", "--config", str(config)], {})
    prepared.lock.close()
    flags = {c.name: c.flags for c in prepared.children}
    assert "--threads" not in flags["prefill-0"]
    assert "--threads" in flags["decode-0"]


def test_a_failed_preparation_lets_the_folder_go(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--state-dir", str(tmp_path), "--port", str(taken.getsockname()[1])]
        with pytest.raises(NotStartable):
            prepare(flags, {})
    lock_state_dir(tmp_path).close()


@pytest.mark.parametrize("flags", [["--nats-server", "a b"], ["--decode", "0"], ["--prot", "1"], ["stray"]])
def test_bad_flags_are_refused(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SettingsError):
        prepare(["--state-dir", str(tmp_path), *flags], {})
