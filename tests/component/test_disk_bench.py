from pathlib import Path

import pytest

from tests.bench import disk


async def test_the_bench_gives_a_rate_for_every_way_to_read_and_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "ROUNDS", 1)
    monkeypatch.setattr(disk, "NUM_BLOCKS", 40)
    measured = await disk.measure(tmp_path)
    rates = {name: value for name, value in measured.items() if "stall" not in name}
    kinds = ("plain read", "tier read", "tier read by layer", "rocksdb get")
    expected = {f"{kind}, {cache}" for kind in kinds for cache in ("warm", "cold")}
    assert rates.keys() == expected | {"plain write", "tier write", "rocksdb put"}
    assert all(value > 0 for value in rates.values())


def test_the_storage_is_named_by_its_file_system_and_device(tmp_path: Path) -> None:
    assert " on " in disk._storage(tmp_path)
    assert disk._storage(Path("/proc")).startswith("proc")
