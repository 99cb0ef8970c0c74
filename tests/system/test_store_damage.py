"""What happens to a store's files behind its back costs hits and never a wrong text: the store is killed, its
files are damaged, `up` starts it again, and the same prompts get the same answers."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from black_box import Mesh, until

pytestmark = pytest.mark.system
MESH = "damage"

ANSWER_TOKENS = 8
NUM_PROMPT_BLOCKS = 24
"""Full ones of each prompt, at least. The pools hold two prompts: the one before those is forgotten there."""
PROMPTS = [
    f"Entry {n}: " + " ".join(f"the {n * 40 + i}. stone lies beside the {i}. tree;" for i in range(28))
    for n in range(4)
]
STORE = "store-0"


def ask(mesh: Mesh) -> tuple[list[str], int]:
    """The answers, and how many prompt tokens were found."""
    client = mesh.client()
    answers = [
        client.completions.create(
            model=mesh.model,
            prompt=prompt,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        for prompt in PROMPTS
    ]
    cached = [a.usage.prompt_tokens_details for a in answers if a.usage]
    return [a.choices[0].text for a in answers], sum((c.cached_tokens or 0) for c in cached if c)


def wait_written(mesh: Mesh) -> None:
    """Until everything is on disk."""

    def is_written() -> bool:
        num_blocks = mesh.metric_of(STORE, "kvmesh_store_tier_blocks", tier="disk")
        is_busy = mesh.metric_of(STORE, "kvmesh_store_num_unwritten_blocks")
        is_coming = mesh.metric_of(STORE, "kvmesh_store_num_staged_blocks")
        return num_blocks >= NUM_PROMPT_BLOCKS * len(PROMPTS) and not is_busy and not is_coming

    until(is_written, timeout_seconds=30, what="the store has written all blocks")


def restart_store(mesh: Mesh, damage: Callable[[Path], None] | None) -> None:
    """Kill it, damage its files before it is back, and wait until both workers are linked to it again."""
    os.kill(mesh.process.pid, signal.SIGSTOP)  # it would start the store again at once
    try:
        old = mesh.kill(STORE)
        for segment in segments(mesh.state_dir) if damage else ():
            damage(segment)
    finally:
        os.kill(mesh.process.pid, signal.SIGCONT)
    mesh.wait_restarted(STORE, old)
    until(
        lambda: mesh.metric_of(STORE, "kvmesh_num_links") >= 2,
        timeout_seconds=30,
        what="both workers are linked to the store",
    )


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
def answers(mesh: Mesh, reference: Callable[[list[str], int], list[str]]) -> list[str]:
    """What the prompts must get, and got while nothing was stored."""
    expected = reference(PROMPTS, ANSWER_TOKENS)
    assert ask(mesh) == (expected, 0)
    return expected


def test_after_a_restart_what_was_on_disk_is_found(mesh: Mesh, answers: list[str]) -> None:
    wait_written(mesh)
    restart_store(mesh, None)
    texts, num_found = ask(mesh)
    assert texts == answers
    assert num_found >= 16 * NUM_PROMPT_BLOCKS * len(PROMPTS)


@pytest.mark.parametrize("damage", [truncate, flip, delete, swap_halves])
def test_damaged_files_cost_hits_and_never_a_wrong_text(
    mesh: Mesh, answers: list[str], damage: Callable[[Path], None]
) -> None:
    wait_written(mesh)
    restart_store(mesh, damage)
    texts, num_found = ask(mesh)
    assert texts == answers
    assert num_found < 16 * NUM_PROMPT_BLOCKS * len(PROMPTS)
    again, num_found_again = ask(mesh)
    assert again == answers
    assert num_found_again > num_found, "what was computed again is stored again"
    mesh.wait_idle()
