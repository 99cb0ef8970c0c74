"""Random lives of a tier against a plain dict."""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from disk_blocks import SETTINGS, Shape, block, name_of, names_of, read
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.kv_store.disk.disk_tier import DiskTier

T = TypeVar("T")
SHAPES: list[Shape] = [(3, 1000), (8, 512)]
NAMES = [name_of(number) for number in range(60)]
SMALL = msgspec.structs.replace(SETTINGS, segment_bytes=40_000, index_write_buffer_bytes=64 << 10)

some_names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=40)


def shape_of(name: bytes) -> Shape:
    return SHAPES[name[0] % 2]


class TierAgainstDict(RuleBasedStateMachine):
    """What is held, by name, is all the model knows: the bytes follow from the name."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._folder = tempfile.TemporaryDirectory(prefix="kvmesh-model-")
        self._model: dict[bytes, bytes] = {}

    @initialize()
    def start(self) -> None:
        self._open()

    @rule(names=some_names, parent=st.sampled_from([b"", *NAMES]))
    def write(self, names: list[bytes], parent: bytes) -> None:
        blocks = [block(name, parent, shape_of(name)) for name in names]
        assert self._run(self._tier.write(blocks)) == [True] * len(names)
        self._model |= dict.fromkeys(names, parent)

    @rule(names=some_names)
    def read(self, names: list[bytes]) -> None:
        for shape in SHAPES:
            of_shape = [name for name in names if shape_of(name) == shape]
            answer = self._run(read(self._tier, of_shape, shape))
            assert answer.right == [name for name in of_shape if name in self._model]

    @rule(names=some_names)
    def remove(self, names: list[bytes]) -> None:
        self._run(self._tier.remove(names))
        for name in names:
            self._model.pop(name, None)

    @rule()
    def reopen(self) -> None:
        self._run(self._tier.close())
        self._open()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "_tier"):
            assert self._tier.num_blocks == len(self._model)
            sizes = [shape[0] * shape[1] for shape in map(shape_of, self._model)]
            assert self._tier.num_used_bytes == sum(sizes)

    def teardown(self) -> None:
        if hasattr(self, "_tier"):
            self._run(self._tier.close())
        self._runner.close()
        self._folder.cleanup()

    def _open(self) -> None:
        self._tier = DiskTier(Path(self._folder.name), SMALL)
        found = self._run(self._tier.open())
        assert {held.name: held.parent for held in found} == self._model
        assert len(names_of(found)) == len(self._model)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)


TestTierAgainstDict = TierAgainstDict.TestCase
