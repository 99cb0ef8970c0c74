"""What `up` starts, with which flags, and which words of its command line go where."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.presence import ServiceKind
from libs.mesh.workers import WORKERS
from services.up.announce import cli_command, invitation, reachable_url
from services.up.plan import Child, children_environment, plan_children, share_threads
from services.up.prepare import split_flags, with_admin_key, with_threads
from services.up.settings import UpSettings

OWN = UpSettings.__struct_fields__
SERVICES = frozenset({"dtype", "eager", "api_key", "port", "model", "config"})


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 3), st.integers(1, 3), st.integers(0, 3))
def test_each_mesh_has_what_was_asked_for_and_one_gateway(
    num_prefill: int, num_decode: int, num_stores: int, num_routers: int, num_coordinators: int
) -> None:
    settings = UpSettings(
        prefill=num_prefill,
        decode=num_decode,
        stores=num_stores,
        routers=num_routers,
        coordinators=num_coordinators,
    )
    children = plan_children(settings, port=8000)
    kinds = [c.kind for c in children]
    assert kinds.count(ServiceKind.PREFILL_WORKER) == num_prefill
    assert kinds.count(ServiceKind.DECODE_WORKER) == num_decode
    assert kinds.count(ServiceKind.KV_STORE) == num_stores
    assert kinds.count(ServiceKind.ROUTER) == num_routers
    assert kinds.count(ServiceKind.MIGRATION_COORDINATOR) == num_coordinators
    assert kinds.count(ServiceKind.GATEWAY) == 1
    assert len({c.name for c in children}) == len(children)


def test_workers_are_named_by_role_and_number() -> None:
    names = [c.name for c in plan_children(UpSettings(prefill=2, decode=1), port=8000)]
    assert names == [
        *("gateway", "router-0", "coordinator-0", "store-0"),
        *("prefill-0", "prefill-1", "decode-0"),
    ]


def test_a_coordinator_ends_after_the_workers_whose_moves_it_ends() -> None:
    stages = {c.kind: c.stage for c in plan_children(UpSettings(), port=8000)}
    workers = [stages[kind] for kind in WORKERS]
    assert stages[ServiceKind.GATEWAY] < min(workers)
    assert max(workers) < stages[ServiceKind.MIGRATION_COORDINATOR]


def test_without_prefill_workers_the_decode_workers_run_prompts() -> None:
    alone = plan_children(UpSettings(prefill=0), port=8000)[-1]
    assert alone.flags == ("--role", "both")
    assert plan_children(UpSettings(), port=8000)[-1].flags == ()


@given(st.integers(1, 256), st.integers(0, 64))
def test_workers_together_use_no_more_threads_than_cores_unless_there_are_more_workers(
    num_cores: int, num_workers: int
) -> None:
    threads = share_threads(num_cores, num_workers)
    assert threads >= 1
    assert threads == 1 or threads * num_workers <= num_cores


class _WorkerSettings(msgspec.Struct, frozen=True):
    threads: int = 0


class _OtherSettings(msgspec.Struct, frozen=True):
    port: int = 0


@pytest.mark.parametrize("kind", WORKERS)
def test_only_workers_that_name_no_threads_themselves_get_a_share(kind: ServiceKind) -> None:
    worker = Child("w", kind)
    assert with_threads(worker, _WorkerSettings(), 4).flags == ("--threads", "4")
    assert with_threads(worker, _WorkerSettings(threads=3), 4).flags == ()
    assert with_threads(worker, _OtherSettings(), 4).flags == ()
    assert with_threads(Child("r", ServiceKind.ROUTER), _WorkerSettings(), 4).flags == ()


def test_the_admin_key_is_a_variable_of_the_gateway_alone_and_in_no_repr() -> None:
    children = [with_admin_key(c, "k-1") for c in plan_children(UpSettings(decode=2), port=8000)]
    assert [c.name for c in children if c.environ] == ["gateway"]
    assert children[0].environ == {"KVMESH_ADMIN_KEY": "k-1"}
    assert "k-1" not in repr(children)
    assert all("k-1" not in flag for child in children for flag in child.flags)


def test_flags_of_services_become_variables_and_the_rest_stays() -> None:
    argv = [
        "--port",
        "1",
        "--dtype",
        "float32",
        "--eager",
        "--prefill=2",
        "--api-key=x",
        "--what",
        "--config",
        "k",
    ]
    own, variables = split_flags(argv, OWN, SERVICES)
    assert own == ["--port", "1", "--prefill=2", "--what"]
    assert variables == {
        "KVMESH_DTYPE": "float32", "KVMESH_EAGER": "true", "KVMESH_API_KEY": "x", "KVMESH_CONFIG": "k",
    }  # fmt: skip


def test_a_switch_of_a_service_can_be_turned_off() -> None:
    assert split_flags(["--no-eager"], OWN, SERVICES) == ([], {"KVMESH_EAGER": "false"})


@given(
    st.lists(
        st.sampled_from(
            ["--port", "1", "--dtype", "float32", "--eager", "--no-eager", "--x=1", "--api-key=k"]
        )
    )
)
def test_no_word_of_the_command_line_gets_lost(argv: list[str]) -> None:
    own, variables = split_flags(argv, OWN, SERVICES)
    text = " ".join([*own, *variables, *variables.values()]).lower()
    for word in argv:
        stem = word.partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
        assert stem in text or (stem in ("1", "float32") and variables), "overwritten by a later one at most"


def test_all_children_share_one_secret_and_one_that_is_set_stays() -> None:
    made = children_environment(UpSettings(), {}, {}, secret="fresh")
    kept = children_environment(UpSettings(), {"KVMESH_LINK_SECRET": "set"}, {}, secret="fresh")
    assert (made["KVMESH_LINK_SECRET"], kept["KVMESH_LINK_SECRET"]) == ("fresh", "set")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("gpu-1", "http://gpu-1:80"),
    ],
)
def test_the_address_shown_can_be_reached_from_here(host: str, url: str) -> None:
    assert reachable_url(host, 80) == url


def test_the_line_to_paste_is_one_shell_command_even_with_quotes_in_the_name() -> None:
    import json
    import shlex

    said = invitation("http://127.0.0.1:80", 'it\'s "big"', needs_key=True, command="./bin/kvmesh")
    command = said[said.index("curl ") :].split("\n\n")[0]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[1] == "http://127.0.0.1:80/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s "big"'
    assert "Authorization: Bearer $KVMESH_API_KEY" in words
    assert said.splitlines()[-2:] == [
        'or: ./bin/kvmesh chat --url http://127.0.0.1:80 "Why is the sky blue?"',
        "The mesh at work, live: http://127.0.0.1:80/mesh",
    ]


def test_a_state_folder_that_the_command_would_not_find_is_told() -> None:
    said = invitation("http://h:80", "m", needs_key=False, command="kvmesh", state_dir="/data/my mesh")
    assert "export KVMESH_STATE_DIR='/data/my mesh'\n" in said


@pytest.mark.parametrize("is_installed", [True, False], ids=["installed", "not installed"])
def test_the_command_told_is_one_that_works_where_the_person_stands(
    tmp_path: Path, is_installed: bool
) -> None:
    python = tmp_path / "my venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    if not is_installed:
        assert cli_command(python, tmp_path, "/elsewhere/kvmesh") == f"'{python}' -m services.cli"
        return
    script = python.with_name("kvmesh")
    script.touch()
    assert cli_command(python, tmp_path, str(script)) == "kvmesh"
    assert cli_command(python, tmp_path, None) == "'./my venv/bin/kvmesh'"
    assert cli_command(python, python.parent, "/elsewhere/kvmesh") == "./kvmesh"
    assert cli_command(python, Path("/"), None) == f"'./{str(script)[1:]}'"
    assert cli_command(python, tmp_path / "deep", None) == f"'{script}'"
