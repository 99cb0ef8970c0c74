"""Meshes and the single-process reference that the system tests share."""

import os
from collections.abc import Callable, Iterator

import pytest
from browser import Browser, find_chromium, running_browser
from mesh_reference import Reference
from meshes import MESHES
from tiny_model import write_tiny_model

from black_box import Mesh, running_mesh


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `mesh` gets the one that its file names as MESH; it ends after its last test."""
    if "mesh" in metafunc.fixturenames:
        metafunc.parametrize("mesh", [metafunc.module.MESH], indirect=True, scope="session")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny random model."""
    directory = tmp_path_factory.mktemp("model") / "tiny-llama"
    directory.mkdir()
    return str(write_tiny_model(directory))


@pytest.fixture(scope="session")
def mesh(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    """In float32, with the flags that `MESHES` has under this name."""
    flags, model, api_key = MESHES[request.param]
    state_dir = tmp_path_factory.mktemp(request.param)
    words = flags.format(state_dir=state_dir).split()
    yield from running_mesh(
        state_dir, "--dtype", "float32", *words, model=model or tiny_model, api_key=api_key
    )


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real one. Where none is installed tests are skipped, or fail if $TESTS_REQUIRE is `browser`."""
    executable = find_chromium()
    if executable is None:
        ends = pytest.fail if os.environ.get("TESTS_REQUIRE") == "browser" else pytest.skip
        ends(
            'no Chromium is installed: apt-get install chromium && make test ARGS="tests/system -k mesh_page"'
        )
    with running_browser(executable, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="session")
def reference(mesh: Mesh) -> Callable[[list[str], int], list[str]]:
    """Greedy texts of prompts, computed in this process with the weights that the mesh serves."""
    return Reference(mesh.source).texts
