"""A store on a file system that somebody else fills: writes pause, all else goes on, and what memory kept
meanwhile is written once there is room."""

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from store_scene import StoreScene, names_of, store_scene


@pytest.fixture
async def scene() -> AsyncIterator[StoreScene]:
    async with store_scene() as scene:
        yield scene


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def take_all_room(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free == 0
    return ballast


async def test_a_full_disk_pauses_writes_alone_and_room_resumes_them(
    scene: StoreScene, small_disk: Path
) -> None:
    store = await scene.store(memory_blocks=600, disk_mib=32, folder=small_disk, lease_seconds=0.001)
    worker = await scene.worker(store)
    await worker.put(names_of(1, 40))
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 40)
    ballast = take_all_room(small_disk)
    chains = list(range(2, 12))
    for chain in chains:
        await worker.put(names_of(chain, 40))
    await scene.until(lambda: store.gauge("store_num_blocks") == 440)
    await scene.until(lambda: store.gauge("store_disk_paused") == 1)
    assert store.gauge("store_disk_write_errors_total") > 0
    assert store.gauge("store_disk_pauses_total") == 1
    for chain in (1, *chains):
        assert await worker.fetch(names_of(chain, 40))
    before = store.gauge("store_tier_blocks", tier="disk")
    assert before < 440
    ballast.unlink()
    await scene.until(lambda: store.gauge("store_disk_paused") == 0)
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 440)
    assert await store.end() == 0
    again = await scene.store(disk_mib=32, folder=small_disk)
    worker = await scene.worker(again)
    for chain in (1, *chains):
        assert await worker.fetch(names_of(chain, 40))
