"""Settings: who wins, what is read, what is refused and in which words."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from libs.config.errors import BadSetting, HelpAsked, MissingSetting, SettingsError, UnknownSetting
from libs.config.load import load_settings, load_settings_or_exit


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """Settings made up for the tests."""

    port: Annotated[int, Meta(description="where to listen", ge=0, le=65535)] = 8000
    share: Annotated[float, Meta(description="of the memory", gt=0, le=1)] = 0.5
    eager: Annotated[bool, Meta(description="begin at once")] = False
    nats_server: Annotated[str, Meta(description="broker")] = "nats://default"
    served_names: Annotated[tuple[str, ...], Meta(description="aliases")] = ()
    dtype: Annotated[Literal["auto", "float32"], Meta(description="numbers")] = "auto"
    colour: Annotated[Colour, Meta(description="a member")] = Colour.RED
    num_blocks: Annotated[int, Meta(ge=1)] | None = None
    link_secret: Annotated[str, Meta(description="hidden", min_length=3, extra={"secret": True})] = "secret"


def load(*argv: str, **environ: str) -> Example:
    return load_settings(Example, argv, environ, "gateway")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_without_any_source_the_defaults_hold() -> None:
    assert load() == Example()


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    config = write(tmp_path / "k.toml", "[mesh]\nport = 1\n[gateway]\nport = 2\n")
    assert load("--config", config).port == 2
    assert load(KVMESH_CONFIG=config, KVMESH_PORT="3").port == 3
    assert load("--config", config, "--port", "4", KVMESH_PORT="3").port == 4


@given(st.permutations([1, 2, 3, 4]), st.sets(st.sampled_from(["mesh", "own", "env", "flag"])))
def test_the_strongest_source_present_decides(values: list[int], sources: set[str]) -> None:
    import tempfile

    by_source = dict(zip(("mesh", "own", "env", "flag"), values, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"[mesh]\nport = {by_source['mesh']}"] if "mesh" in sources else []
        lines += [f"[gateway]\nport = {by_source['own']}"] if "own" in sources else []
        config = write(Path(folder) / "k.toml", "\n".join(lines))
        environ = {"KVMESH_PORT": str(by_source["env"])} if "env" in sources else {}
        flags = ["--port", str(by_source["flag"])] if "flag" in sources else []
        port = load("--config", config, *flags, **environ).port
    present = [by_source[s] for s in ("flag", "env", "own", "mesh") if s in sources]
    assert port == (present[0] if present else Example().port)


def test_values_of_every_shape_are_read_from_text() -> None:
    flags = ["--port=9", "--share", "0.25", "--eager", "--served-names", "a, b,c", "--dtype", "float32"]
    read = load(*flags, "--colour", "blue", "--num-blocks", "7")
    assert read == Example(
        port=9,
        share=0.25,
        eager=True,
        served_names=("a", "b", "c"),
        dtype="float32",
        colour=Colour.BLUE,
        num_blocks=7,
    )


def test_a_switch_can_be_turned_off_again() -> None:
    assert load("--no-eager", KVMESH_EAGER="true").eager is False
    assert load("--eager=false").eager is False


def test_toml_lists_and_types_are_taken_as_they_are(tmp_path: Path) -> None:
    config = write(tmp_path / "k.toml", '[gateway]\nserved_names = ["a", "b"]\neager = true\nshare = 1\n')
    read = load("--config", config)
    assert (read.served_names, read.eager, read.share) == (("a", "b"), True, 1.0)


def test_text_in_toml_is_no_number(tmp_path: Path) -> None:
    config = write(tmp_path / "k.toml", '[gateway]\nport = "9"\n')
    with pytest.raises(
        BadSetting, match=r"\[gateway\] port: '9' is not allowed; expected a whole number >= 0"
    ):
        load("--config", config)


def test_the_conventional_variable_is_read_and_ours_goes_before_it() -> None:
    assert load(NATS_SERVER="nats://usual").nats_server == "nats://usual"
    assert load(NATS_SERVER="nats://usual", KVMESH_NATS_SERVER="nats://ours").nats_server == "nats://ours"


def test_an_empty_variable_counts_as_absent() -> None:
    assert load(KVMESH_PORT="", KVMESH_CONFIG="").port == Example().port


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (
            ["--port", "70000"],
            {},
            "flag --port: '70000' is not allowed; expected a whole number >= 0 and <= 65535",
        ),
        (["--port", "many"], {}, "flag --port: 'many'"),
        (["--port"], {}, "flag --port: '' is not allowed"),
        (["--share", "nan"], {}, "flag --share: 'nan' is not allowed; expected a number > 0 and <= 1"),
        ([], {"KVMESH_SHARE": "inf"}, "environment variable KVMESH_SHARE: 'inf'"),
        ([], {"KVMESH_DTYPE": "int8"}, "KVMESH_DTYPE: 'int8' is not allowed; expected one of auto, float32"),
        (["--colour", "green"], {}, "expected one of red, blue"),
        (["--num-blocks", "0"], {}, "a whole number >= 1 or none"),
        (["--eager=maybe"], {}, "expected true or false"),
        (["--prot", "1"], {}, "unknown flag --prot; did you mean --port?"),
        (["--no-port"], {}, "unknown flag --no-port"),
        ([], {"KVMESH_PROT": "1"}, "unknown environment variable KVMESH_PROT; did you mean KVMESH_PORT?"),
        (["8000"], {}, "unexpected argument '8000'"),
        (["--config", "/nowhere/k.toml"], {}, "cannot read the settings file /nowhere/k.toml"),
    ],
)
def test_what_is_wrong_is_said_with_its_origin_and_what_is_allowed(
    argv: list[str], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load(*argv, **environ)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gateway]\nprot = 1", "[gateway]: prot; did you mean port?"),
        ("[mesh]\nprot = 1", "[mesh]: prot; did you mean port?"),
        ("[gatway]\nport = 1", "[gatway]; did you mean [gateway]?"),
        ("port = 1", "[port]"),
        ("[gateway\n", "is not valid TOML"),
    ],
)
def test_a_file_with_anything_unknown_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load("--config", write(tmp_path / "k.toml", text))
    assert said in str(refused.value)


def test_what_only_another_service_knows_is_fine_where_all_share_it(tmp_path: Path) -> None:
    config = write(tmp_path / "k.toml", "[mesh]\nthreads = 2\n[decode_worker]\nthreads = 1\n")
    assert load("--config", config, KVMESH_THREADS="2") == Example()
    with pytest.raises(UnknownSetting):
        load("--threads", "2")


def test_a_secret_is_not_repeated_in_an_error() -> None:
    with pytest.raises(BadSetting) as refused:
        load("--link-secret", "pw")
    assert "pw" not in str(refused.value)


def test_a_required_setting_that_nobody_gave_is_named() -> None:
    class Needy(msgspec.Struct, frozen=True):
        """Needs something."""

        model: Annotated[str, Meta(description="which weights")]

    with pytest.raises(MissingSetting, match=r"--model \(or KVMESH_MODEL\) is needed: which weights"):
        load_settings(Needy, [], {}, "gateway")


def test_help_lists_every_setting_with_default_variable_and_meaning() -> None:
    with pytest.raises(HelpAsked) as asked:
        load("--help")
    text = str(asked.value)
    for field in msgspec.structs.fields(Example):
        assert f"--{field.name.replace('_', '-')}" in text
        assert f"KVMESH_{field.name.upper()}" in text
    for said in (
        "NATS_SERVER",
        "--no-eager",
        "where to listen",
        "default 8000",
        "one of red, blue",
        "--config",
    ):
        assert said in text


def test_a_program_ends_with_2_and_one_line_on_bad_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings_or_exit(Example, "gateway", ["--prot", "1"], {})
    assert ended.value.code == 2
    assert capsys.readouterr().err == "gateway: unknown flag --prot; did you mean --port?\n"


def test_a_program_ends_with_0_after_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings_or_exit(Example, "gateway", ["-h"], {})
    assert ended.value.code == 0
    assert "--port" in capsys.readouterr().out
