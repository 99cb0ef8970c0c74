"""`up` whose reader has had enough, as in `kvmesh up | head -1`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system


def test_an_up_that_nobody_reads_ends_with_all_that_it_started_and_without_a_word(
    tmp_path: Path, tiny_model: str
) -> None:
    read_end, write_end = os.pipe()
    words = (
        "--model",
        tiny_model,
        "--port",
        "0",
        "--dtype",
        "float32",
        "--num-blocks",
        "64",
        "--max-model-len",
        "512",
    )
    with os.fdopen(read_end) as reader, os.fdopen(write_end) as unread_end:
        up = subprocess.Popen(
            [sys.executable, "-m", "services.up", "--state-dir", str(tmp_path), *words],
            stdout=unread_end,
            stderr=subprocess.PIPE,
            text=True,
        )
        unread_end.close()
        assert reader.readline().startswith("kvmesh ")
    _, said = up.communicate(timeout=60)
    assert (up.returncode, said) == (141, "")
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert not left
