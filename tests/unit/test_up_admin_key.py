"""The admin key is made once, kept for its owner alone, and given to the gateway alone."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.up.admin_key import settle_admin_key
from services.up.preflight import NotStartable
from services.up.prepare import Prepared, prepare


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_made_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)  # the mode must not depend on it
    try:
        key = settle_admin_key(tmp_path, "")
    finally:
        os.umask(before)
    assert len(key) >= 40
    assert (tmp_path / "admin.key").read_text() == key + "\n"
    assert mode(tmp_path / "admin.key") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["admin.key"]


def test_the_next_start_finds_the_same_key_and_another_folder_has_another(tmp_path: Path) -> None:
    key = settle_admin_key(tmp_path, "")
    assert settle_admin_key(tmp_path, "") == key
    (tmp_path / "other").mkdir()
    assert settle_admin_key(tmp_path / "other", "") != key


@pytest.mark.parametrize("mode_bits", [0o644, 0o640, 0o602])
def test_a_key_that_others_could_have_read_or_written_is_made_anew(tmp_path: Path, mode_bits: int) -> None:
    (tmp_path / "admin.key").write_text("known-to-all\n")
    (tmp_path / "admin.key").chmod(mode_bits)
    assert settle_admin_key(tmp_path, "") != "known-to-all"
    assert mode(tmp_path / "admin.key") == 0o600


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_key_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "admin.key").write_bytes(content)
    (tmp_path / "admin.key").chmod(0o600)
    assert len(settle_admin_key(tmp_path, "")) >= 40


def test_what_a_start_that_was_killed_left_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "admin.new").write_text("half")
    assert settle_admin_key(tmp_path, "") == (tmp_path / "admin.key").read_text().strip()


def test_a_key_that_is_given_is_taken_and_none_that_is_another_stays_behind(tmp_path: Path) -> None:
    settle_admin_key(tmp_path, "")
    assert settle_admin_key(tmp_path, "given") == "given"
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_no_file_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "admin.key").mkdir()
    with pytest.raises(NotStartable, match=r"cannot keep the admin key in .*admin\.key"):
        settle_admin_key(tmp_path, "")


@contextmanager
def prepared(state_dir: Path, *flags: str, **environ: str) -> Iterator[Prepared]:
    plan = prepare(["--port", "0", "--state-dir", str(state_dir), *flags], {**os.environ, **environ})
    with plan.lock:
        yield plan


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_a_given_key_reaches_the_gateway_and_nobody_else(tmp_path: Path, way: str) -> None:
    flags = ("--admin-key", "given") if way == "flag" else ()
    environ = {"KVMESH_ADMIN_KEY": "given"} if way == "variable" else {}
    with prepared(tmp_path, *flags, **environ) as plan:
        told = {child.name: dict(child.environ) for child in plan.children if child.environ}
        assert told == {"gateway": {"KVMESH_ADMIN_KEY": "given"}}
        assert "KVMESH_ADMIN_KEY" not in plan.environ
    assert not (tmp_path / "admin.key").exists()


def test_without_one_the_gateway_gets_the_one_that_is_kept(tmp_path: Path) -> None:
    with prepared(tmp_path) as plan:
        key = (tmp_path / "admin.key").read_text().strip()
        assert plan.children[0].environ == {"KVMESH_ADMIN_KEY": key}


def test_an_admin_key_that_is_an_api_key_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotStartable, match="none of those in --api-key"):
        prepare(["--state-dir", str(tmp_path), "--api-key", "same", "--admin-key", "same"], {**os.environ})


def test_flags_of_coordinator_and_workers_are_handed_on(tmp_path: Path) -> None:
    flags = ("--no-automatic", "--delta-hi", "0.3", "--device-share", "0.25")
    with prepared(tmp_path, *flags) as plan:
        told = {name: plan.environ.get(name) for name in ("KVMESH_AUTOMATIC", "KVMESH_DELTA_HI")}
        assert told == {"KVMESH_AUTOMATIC": "false", "KVMESH_DELTA_HI": "0.3"}
        assert plan.environ["KVMESH_DEVICE_SHARE"] == "0.25"


def test_a_bad_setting_of_the_coordinator_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(NotStartable, match=r"coordinator-0: .*--delta-hi"):
        prepare(["--state-dir", str(tmp_path), "--delta-hi", "9"], {**os.environ})
