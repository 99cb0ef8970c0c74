"""KV of a move is copied between the layers of steps that are under way."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from engine_moves import Mesh, Told, begin, check_baseline, core_of, drain, generation, model_of, prompt_of

from libs.engine.errors import MoveRefused
from libs.engine.hosting.port import HostLost
from libs.engine.outputs import CopyProgress
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.request.generation import Generation

MODULES = {
    "first layers": whole_layers(0, 2),
    "last layers": whole_layers(2, 4),
    "a head": heads_of(0, 4, (1,)),
    "heads of some layers": heads_of(1, 3, (0, 2)),
    "lent blocks": remote_blocks(4),
}
LENGTHS = (150, 9, 131, 60)


def asked() -> list[Generation]:
    return [
        generation(prompt_of(length, one), f"s{one}", max_tokens=30, seed=one % 2 or None)
        for one, length in enumerate(LENGTHS)
    ]


class Gap:
    """What is done in each gap between two layers."""

    def __init__(self) -> None:
        self.act: Callable[[], object] | None = None
        self.num = 0

    def __call__(self) -> None:
        self.num += 1
        if self.act is not None:
            self.act()


def mesh_of(num_blocks: int = 90, max_num_batched_tokens: int = 64) -> tuple[Mesh, Gap]:
    gap = Gap()
    core = core_of(
        model_of("gqa"),
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        between_layers=gap,
    )
    return Mesh(core), gap


def unmoved() -> dict[str, list[int]]:
    core = core_of(model_of("gqa"))
    for one in asked():
        begin(core, one)
    return drain(core).tokens


class Walk:
    """Away and home again, for ever, each copied between layers alone and switched after some steps."""

    def __init__(self, mesh: Mesh, gap: Gap, module: Module, num_steps: int, max_bytes: int) -> None:
        self.mesh, self.gap, self.module = mesh, gap, module
        self.num_steps, self.max_bytes = num_steps, max_bytes
        self.num_copied_bytes = self.num_moves = 0

    def copy(self) -> None:
        progress: CopyProgress = self.mesh.home.migrator.copy_in_step(
            f"m{self.num_moves // 2}", self.max_bytes
        )
        self.num_copied_bytes += progress.num_copied_bytes

    def before_step(self, number: int) -> None:
        if number % self.num_steps:
            return
        is_home = not self.mesh.home.placement.placed
        if self.gap.act is not None:
            self.gap.act = None
            self.mesh.switch(f"m{self.num_moves // 2}")
            if not is_home:
                self.mesh.hosts["host"].hosted.close("home", f"m{self.num_moves // 2}")
            self.num_moves += 1
            is_home = not is_home
        if is_home:
            self.mesh.begin(self.module, f"m{self.num_moves // 2}", lent=40)
        else:
            self.mesh.begin_return(f"m{self.num_moves // 2}")
        self.gap.act = self.copy


@pytest.mark.parametrize("max_bytes", [1, 1 << 30], ids=["block by block", "all at once"])
@pytest.mark.parametrize("num_steps", [2, 4])
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
def test_tokens_do_not_change_when_blocks_are_copied_while_steps_write_them(
    module: Module, num_steps: int, max_bytes: int
) -> None:
    mesh, gap = mesh_of(40)
    for one in asked():
        begin(mesh.home, one)
    walk = Walk(mesh, gap, module, num_steps, max_bytes)
    told = drain(mesh.home, walk.before_step)
    assert told.failed == {}
    assert told.tokens == unmoved()
    assert walk.num_moves >= 6
    assert walk.num_copied_bytes > 0
    check_baseline(mesh.home)


def test_a_host_lost_between_two_layers_is_dealt_with_when_the_step_is_over() -> None:
    mesh, gap = mesh_of()
    for one in asked():
        begin(mesh.home, one)
    mesh.away(heads_of(3, 4, (1,)), "m")
    told = Told()
    told.add(mesh.home.step())
    mesh.begin_return("m")
    seen: list[tuple[int, bool]] = []

    def lose() -> None:
        mesh.fuses["host"] = 0
        with pytest.raises(HostLost):
            mesh.home.migrator.copy_in_step("m", 1)
        seen.append((mesh.home.placement.epoch, bool(mesh.home.sequences.by_age[0].blocks)))
        mesh.fuses.pop("host")  # what the step itself asks is answered

    gap.act = lose
    told.add(mesh.home.step())
    assert seen == [(1, True)] * 3  # nothing comes after the last layer of a step that wants no logits
    assert mesh.home.placement.placed == ()
    gap.act = None
    with pytest.raises(MoveRefused, match="its host was lost"):
        mesh.home.migrator.copy_some("m", 1)
    drain(mesh.home, told=told)
    assert told.failed == {}
    assert told.tokens == unmoved()
    check_baseline(mesh.home)


def test_a_host_lost_to_a_copy_and_to_its_step_is_lost_once() -> None:
    mesh, gap = mesh_of()
    for one in asked():
        begin(mesh.home, one)
    mesh.away(heads_of(0, 4, (1,)), "m")
    told = Told()
    told.add(mesh.home.step())
    mesh.begin_return("m")
    mesh.fuses["host"] = 3

    def copy() -> None:
        with suppress(HostLost):
            mesh.home.migrator.copy_in_step("m", 1)

    gap.act = copy
    told.add(mesh.home.step())
    gap.act = None
    assert mesh.home.placement.epoch == 2
    drain(mesh.home, told=told)
    assert told.failed == {}
    assert told.tokens == unmoved()
    assert mesh.home.placement.epoch == 2


def test_one_step_is_long_enough_to_copy_all_that_was_there_before_it() -> None:
    mesh, gap = mesh_of(max_num_batched_tokens=200)
    begin(mesh.home, generation(prompt_of(150), "before"))
    drain(mesh.home)
    num_blocks = mesh.begin(heads_of(0, 4, (1,)), "m")
    begin(mesh.home, generation(prompt_of(150, 1), "long"))
    lefts: list[int] = []
    block_bytes = 4 * 2 * 8 * 16 * 4
    copy = partial(mesh.home.migrator.copy_in_step, "m", block_bytes * -(-num_blocks // 4))
    gap.act = lambda: lefts.append(copy().num_left_blocks)
    mesh.home.step()
    assert len(lefts) == 4
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[-1] == 0
    num_written = mesh.home.migrator.copy_some("m", 1).num_left_blocks + 1
    assert num_written == -(-150 // 8)  # the step's own
