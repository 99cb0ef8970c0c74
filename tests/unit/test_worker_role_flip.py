"""What a worker hands to the one that it becomes: flags, name, and memory of its changes of role."""

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.migration import DenialReason
from libs.bus.messages.presence import ServiceKind
from libs.config.errors import BadSetting, SettingsError
from libs.config.fields import flag_of
from libs.config.load import load_settings
from libs.runtime.successor import Successor
from libs.worker.role_flip import FLIPS_VARIABLE, Flips, flips_so_far, runs_both, worker_after
from libs.worker.settings import WorkerSettings
from services.decode_worker.settings import DecodeWorkerSettings
from services.prefill_worker.settings import PrefillWorkerSettings

PREFILL, DECODE = ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER
SETTINGS: dict[ServiceKind, type[WorkerSettings]] = {
    PREFILL: PrefillWorkerSettings,
    DECODE: DecodeWorkerSettings,
}
OTHER = {PREFILL: DECODE, DECODE: PREFILL}

SHARED: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "block_size": st.integers(1, 1024),
    "kv_memory_gib": st.floats(0.25, 64),
    "link_secret": st.text(min_size=1, max_size=12),
    "probe_port": st.integers(0, 65535),
    "threads": st.integers(0, 8),
    "store_put_mib": st.integers(0, 512),
}
OWN: dict[ServiceKind, dict[str, st.SearchStrategy[Any]]] = {
    PREFILL: {"max_waiting": st.integers(1, 999), "send_timeout_seconds": st.floats(0.5, 60)},
    DECODE: {"max_held": st.integers(1, 999), "store_finished": st.booleans()},
}


def some_of(choices: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=choices)


@st.composite
def started_workers(draw: st.DrawFn) -> tuple[ServiceKind, dict[str, Any], dict[str, Any]]:
    kind = draw(st.sampled_from([PREFILL, DECODE]))
    return kind, draw(some_of(SHARED)), draw(some_of(OWN[kind]))


def flags_of(values: dict[str, Any]) -> list[str]:
    return [f"{flag_of(field)}={value}" for field, value in values.items()]


def read(kind: ServiceKind, argv: tuple[str, ...]) -> WorkerSettings:
    return load_settings(SETTINGS[kind], argv, {}, kind.value)


def after(kind: ServiceKind, argv: list[str], flips: Flips | None = None) -> tuple[Successor, Flips]:
    """The worker that this one becomes, and what it remembers."""
    successor = worker_after(OTHER[kind], "worker-3", SETTINGS[kind], argv, flips or Flips())
    return successor, flips_so_far(successor.environ)


@given(started_workers())
def test_the_new_worker_has_what_both_kinds_know_and_defaults_for_the_rest(
    started: tuple[ServiceKind, dict[str, Any], dict[str, Any]],
) -> None:
    kind, shared, own = started
    successor, _ = after(kind, flags_of({**shared, **own}))
    assert successor.module == f"services.{OTHER[kind].value}"
    expected = SETTINGS[OTHER[kind]](name="worker-3", **shared)
    assert read(OTHER[kind], successor.flags) == expected


@given(started_workers(), st.integers(1, 4))
def test_there_and_back_however_often_gives_the_worker_that_was(
    started: tuple[ServiceKind, dict[str, Any], dict[str, Any]], num_returns: int
) -> None:
    kind, shared, own = started
    flags, flips = flags_of({**shared, **own}), Flips()
    for _ in range(num_returns):
        away, flips = after(kind, flags, flips)
        back, flips = after(OTHER[kind], list(away.flags), flips)
        flags = list(back.flags)
    assert flips.num_flips == 2 * num_returns
    assert read(kind, tuple(flags)) == SETTINGS[kind](name="worker-3", **shared, **own)


def test_a_worker_without_a_name_of_its_own_keeps_the_one_it_was_given() -> None:
    assert after(PREFILL, [])[0].flags == ("--name=worker-3",)
    assert after(PREFILL, ["--name", "x"])[0].flags == ("--name=worker-3",)


def test_the_settings_file_and_switches_are_handed_on() -> None:
    flags = after(PREFILL, ["--config", "mesh.toml", "--model", "m"])[0].flags
    assert flags == ("--name=worker-3", "--config=mesh.toml", "--model=m")
    _, flips = after(DECODE, ["--no-store-finished"])
    assert flips.set_aside == ("--store-finished=false",)


def test_flags_with_values_that_look_like_flags_stay_values() -> None:
    successor, _ = after(PREFILL, ["--link-secret=--dtype"])
    assert read(DECODE, successor.flags).link_secret == "--dtype"


def test_flags_that_the_worker_cannot_have_been_started_with_are_refused() -> None:
    with pytest.raises(SettingsError, match="--max-held"):
        after(PREFILL, ["--max-held", "3"])


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
def test_what_only_one_kind_has_is_in_nothing_that_the_other_reads(kind: ServiceKind) -> None:
    own = set(SETTINGS[kind].__struct_fields__) - set(SETTINGS[OTHER[kind]].__struct_fields__)
    assert set(OWN[kind]) <= own
    shared = set(SETTINGS[PREFILL].__struct_fields__) & set(SETTINGS[DECODE].__struct_fields__)
    assert set(SHARED) <= shared


def test_every_setting_that_both_kinds_have_is_handed_on() -> None:
    """A setting added to both kinds' own structs, not to what they share, would be lost."""
    both = set(SETTINGS[PREFILL].__struct_fields__) & set(SETTINGS[DECODE].__struct_fields__)
    for field in both - {"name"}:
        _, flips = after(PREFILL, [f"{flag_of(field)}=1"])
        assert flips.set_aside == (), field


def test_a_process_that_never_flipped_remembers_nothing() -> None:
    assert flips_so_far({}) == Flips() == flips_so_far({FLIPS_VARIABLE: ""})


@pytest.mark.parametrize("written", ["3", "{", '{"num_flips": "many"}'])
def test_a_memory_that_no_worker_wrote_is_a_bad_setting(written: str) -> None:
    with pytest.raises(BadSetting, match=FLIPS_VARIABLE):
        flips_so_far({FLIPS_VARIABLE: written})


def test_no_secret_is_remembered_in_the_environment() -> None:
    successor, _ = after(PREFILL, ["--link-secret", "hush", "--max-waiting", "3"])
    assert "hush" not in msgspec.json.encode(successor.environ).decode()


@pytest.mark.parametrize(("role", "is_denied"), [("both", True), ("decode", False)])
def test_only_a_worker_of_one_role_has_another_to_take(
    role: Literal["both", "decode"], is_denied: bool
) -> None:
    denied = runs_both(role)
    assert (denied is not None) == is_denied
    if denied is not None:
        assert denied.reason is DenialReason.INVALID
        assert "role both" in denied.detail
