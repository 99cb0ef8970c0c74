"""What happens to a store's files behind its back costs hits and never a wrong text: the real mesh is ended,
its files are damaged, it is started again, and the same prompts get the same answers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from black_box import MODEL, Mesh, running_mesh

pytestmark = pytest.mark.system

ANSWER_TOKENS = 8
PROMPTS = [
    f"Entry {n}: " + " ".join(f"the {n * 40 + i}. stone lies beside the {i}. tree;" for i in range(24))
    for n in range(4)
]
FLAGS = (
    "--dtype",
    "float32",
    "--num-blocks",
    "512",
    "--memory-gib",
    "0.5",
    "--disk-gib",
    "1",
    "--coordinators",
    "0",
    "--store-fetch-when",
    "always",
    "--store-find-timeout-seconds",
    "10",
    "--store-fetch-timeout-seconds",
    "20",
)


def ask(mesh: Mesh) -> tuple[list[str], int]:
    """The answers, and how many prompt tokens were found."""
    client = mesh.client()
    answers = [
        client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        for prompt in PROMPTS
    ]
    cached = [a.usage.prompt_tokens_details for a in answers if a.usage]
    return [a.choices[0].text for a in answers], sum((c.cached_tokens or 0) for c in cached if c)


def segments(state_dir: Path) -> list[Path]:
    found = sorted((state_dir / "kv").rglob("*.kv"))
    assert found, f"no segment below {state_dir}: {sorted(state_dir.rglob('*'))[:40]}"
    return found


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        for offset in range(1000, path.stat().st_size, 4096):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x40]))


def delete(path: Path) -> None:
    path.unlink()


def swap_halves(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[middle:] + content[:middle])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The state folder of a mesh that has answered all and ended well, and its answers."""
    state_dir = tmp_path_factory.mktemp("stored")
    for mesh in running_mesh(state_dir, *FLAGS):
        texts, _ = ask(mesh)
    return state_dir, texts


def restarted(stored: tuple[Path, list[str]], folder: Path, damage: Callable[[Path], None] | None) -> int:
    """Start on a copy of the folder after the damage; the texts must be the same. Tells the tokens found."""
    shutil.copytree(stored[0] / "kv", folder / "kv")
    if damage is not None:
        for segment in segments(folder):
            damage(segment)
    num_found = 0
    for mesh in running_mesh(folder, *FLAGS):
        texts, num_found = ask(mesh)
        assert texts == stored[1]
        again, num_found_again = ask(mesh)
        assert again == stored[1]
        assert num_found_again > num_found or damage is None, "what was computed again is stored again"
        mesh.wait_idle()
    return num_found


def test_after_a_restart_what_was_on_disk_is_found(
    stored: tuple[Path, list[str]], tmp_path: Path, reference: Callable[[list[str], int], list[str]]
) -> None:
    assert stored[1] == reference(PROMPTS, ANSWER_TOKENS)
    assert restarted(stored, tmp_path, None) > 256 * len(PROMPTS)


@pytest.mark.parametrize("damage", [truncate, flip, delete, swap_halves])
def test_damaged_files_cost_hits_and_never_a_wrong_text(
    stored: tuple[Path, list[str]], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    assert restarted(stored, tmp_path, damage) < 256 * len(PROMPTS)
