"""KV comes and goes while modules are elsewhere: hand-overs, writes from outside, prefixes, preemption."""

from collections.abc import Callable

import pytest
import torch
from engine_moves import (
    SIZE,
    Mesh,
    Told,
    begin,
    check_baseline,
    core_of,
    drain,
    generation,
    model_of,
    prompt_of,
)

from libs.engine.core import EngineCore
from libs.engine.errors import MoveRefused, NotYet
from libs.engine.hosting.calls import HostedCall, WriteBlocks
from libs.engine.hosting.port import Answer, Host
from libs.engine.outputs import LayerOutput, TokenOutput
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import BadPlacement, PlacedModule

MODULES = {
    "first layers": whole_layers(0, 2),
    "last layers": whole_layers(2, 4),
    "a head": heads_of(0, 4, (1,)),
    "heads of some layers": heads_of(1, 3, (0, 2)),
    "lent blocks": remote_blocks(4),
}
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
PROMPT = prompt_of(61)
NUM_BLOCKS = 8


def handed_over(mesh: Mesh, heard: list[LayerOutput], prompt: list[int] = PROMPT) -> list[LayerOutput]:
    heard.clear()
    begin(mesh.home, generation(prompt, "out"), hand_over=True)
    told = drain(mesh.home)
    assert len(told.tokens["out"]) == 1
    for one in heard:
        mesh.home.budget.release(one)
    return list(heard)


def kv_of(outputs: list[LayerOutput]) -> torch.Tensor:
    """`[layers, blocks, heads, 2, size, head_dim]`."""
    return torch.stack(
        [torch.cat([one.blocks for one in outputs if one.layer == layer]) for layer in range(4)]
    )


def written(core: EngineCore, kv: torch.Tensor, name: str, layers: range = range(4)) -> None:
    for layer in layers:
        assert core.incoming.write(name, layer, 0, kv[layer])


@pytest.fixture(scope="module")
def expected_kv() -> torch.Tensor:
    heard: list[LayerOutput] = []
    mesh = Mesh(core_of(model_of("gqa"), on_layers=heard.extend, max_num_batched_tokens=24))
    return kv_of(handed_over(mesh, heard))


def first_token(prompt: list[int]) -> tuple[int, list[int]]:
    core = core_of(model_of("gqa"))
    begin(core, generation(prompt, "x"))
    first, *rest = drain(core).tokens["x"]
    return first, rest


@each_module
def test_a_hand_over_has_all_heads_of_all_layers_in_order(module: Module, expected_kv: torch.Tensor) -> None:
    heard: list[LayerOutput] = []
    core = core_of(
        model_of("gqa"), on_layers=heard.extend, max_num_batched_tokens=24, num_blocks=32, prefix_cache=False
    )
    mesh = Mesh(core)
    mesh.away(module, "m", lent=60)
    hold(mesh, 27 if module == MODULES["lent blocks"] else 0)
    outputs = handed_over(mesh, heard)
    torch.testing.assert_close(kv_of(outputs), expected_kv, rtol=0, atol=1e-5)
    layers = [one.layer for one in outputs]
    assert layers == [0, 1, 2, 3] * (len(layers) // 4)
    assert all(one.blocks.is_contiguous() for one in outputs)


def hold(mesh: Mesh, num_blocks: int) -> None:
    """Holds blocks, so that later ones are lent."""
    if num_blocks:
        asked = generation(prompt_of(num_blocks * SIZE - 1, 9), "holds")
        assert mesh.home.sequences.reserve(asked, "holds", whole_prompt=True) is not None


@each_module
def test_kv_from_outside_lands_where_it_belongs(module: Module, expected_kv: torch.Tensor) -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=32))
    mesh.away(module, "m", lent=60)
    hold(mesh, 27 if module == MODULES["lent blocks"] else 0)
    asked = generation(PROMPT, "in")
    assert mesh.home.sequences.reserve(asked, "in", whole_prompt=True) is not None
    written(mesh.home, expected_kv, "in")
    first, rest = first_token(PROMPT)
    mesh.home.sequences.start_decode("in", TokenOutput("in", 0, first))
    assert drain(mesh.home).tokens["in"] == rest


@each_module
def test_kv_that_is_written_while_a_module_moves_moves_too(module: Module, expected_kv: torch.Tensor) -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=32))
    hold(mesh, 27 if module == MODULES["lent blocks"] else 0)
    asked = generation(PROMPT, "in")
    if module == MODULES["lent blocks"]:
        mesh.away(module, "before", lent=60)
    assert mesh.home.sequences.reserve(asked, "in", whole_prompt=True) is not None
    written(mesh.home, expected_kv, "in", range(1))
    if module != MODULES["lent blocks"]:
        mesh.begin(module, "m")
        mesh.home.migrator.copy_some("m", 1 << 30)
        written(mesh.home, expected_kv, "in", range(1, 3))
        mesh.switch("m")
    move_id = mesh.home.placement.placed[0].move_id
    mesh.begin_return(move_id)
    mesh.home.migrator.copy_some(move_id, 1 << 30)
    written(mesh.home, expected_kv, "in", range(1, 4))
    if module == MODULES["lent blocks"]:
        mesh.home.sequences.abort("holds")
    mesh.switch(move_id)
    first, rest = first_token(PROMPT)
    mesh.home.sequences.start_decode("in", TokenOutput("in", 0, first))
    assert drain(mesh.home).tokens["in"] == rest


class Interrupted:
    """A host that takes blocks while KV comes to the home from outside, as it does between threads."""

    def __init__(self, host: Host, comes: Callable[[], None]) -> None:
        self._host, self._comes = host, comes
        self.worker = host.worker

    def call(self, call: HostedCall) -> Answer:
        answer = self._host.call(call)
        if isinstance(call, WriteBlocks):
            self._comes()
            self._comes = lambda: None
        return answer


@pytest.mark.parametrize("module", [whole_layers(0, 2), heads_of(0, 4, (1,))], ids=["layers", "a head"])
def test_kv_that_is_written_while_a_switch_waits_for_its_host_moves_too(
    module: Module, expected_kv: torch.Tensor
) -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=32))
    assert mesh.home.sequences.reserve(generation(PROMPT, "in"), "in", whole_prompt=True) is not None
    placed = mesh.place(module, "m")
    host = Interrupted(mesh.host("host"), lambda: written(mesh.home, expected_kv, "in"))
    mesh.home.migrator.begin(placed, host, None)
    mesh.switch("m")
    first, rest = first_token(PROMPT)
    mesh.home.sequences.start_decode("in", TokenOutput("in", 0, first))
    assert drain(mesh.home).tokens["in"] == rest


@each_module
def test_a_sequence_begun_before_its_kv_has_come_runs_layer_by_layer(
    module: Module, expected_kv: torch.Tensor
) -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=32))
    mesh.away(module, "m", lent=60)
    hold(mesh, 27 if module == MODULES["lent blocks"] else 0)
    begin(mesh.home, generation(prompt_of(9, 5), "other"))
    asked = generation(PROMPT, "in")
    assert mesh.home.sequences.reserve(asked, "in", whole_prompt=True) is not None
    mesh.home.sequences.begin("in", num_computed_tokens=56, awaits_kv=True)
    first, rest = first_token(PROMPT)
    told: list[int] = []
    for layer in range(4):
        told += [one.token_id for one in mesh.home.step().tokens if one.sequence_id == "in"]
        assert not told
        assert mesh.home.incoming.write("in", layer, 0, expected_kv[layer][:7])
    for _ in range(40):
        told += [one.token_id for one in mesh.home.step().tokens if one.sequence_id == "in"]
    assert told == [first, *rest]


def test_a_switch_waits_for_steps_that_are_put_aside_and_none_begins_meanwhile(
    expected_kv: torch.Tensor,
) -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    for name in ("in", "late"):
        assert mesh.home.sequences.reserve(generation(PROMPT, name), name, whole_prompt=True) is not None
        mesh.home.sequences.begin(name, num_computed_tokens=56, awaits_kv=True)
    mesh.home.incoming.write("in", 0, 0, expected_kv[0][:7])
    told = Told()
    told.add(mesh.home.step())  # its step begins and is put aside
    mesh.begin(heads_of(0, 4, (1,)), "m")
    for layer in range(3):
        for name in ("late", "in")[: 1 + (layer > 0)]:
            mesh.home.incoming.write(name, layer, 0, expected_kv[layer][:7])
        with pytest.raises(NotYet):
            mesh.switch("m")
        told.add(mesh.home.step())
    mesh.home.incoming.write("in", 3, 0, expected_kv[3][:7])
    with pytest.raises(NotYet):
        mesh.switch("m")
    told.add(mesh.home.step())
    mesh.switch("m")  # `late` has most of its KV, but no step of its own
    mesh.home.incoming.write("late", 3, 0, expected_kv[3][:7])
    first, rest = first_token(PROMPT)
    drain(mesh.home, told=told)
    assert told.tokens == {"in": [first, *rest], "late": [first, *rest]}


@each_module
def test_blocks_are_found_by_name_and_read_whole_after_moves(module: Module) -> None:
    plain = core_of(model_of("gqa"), num_blocks=32)
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=32))
    for core in (plain, mesh.home):
        begin(core, generation(PROMPT, "x"))
        drain(core)
    names = plain.sequences.allocator.names()[:NUM_BLOCKS]
    expected = plain.read_blocks(names)
    assert len(expected) == NUM_BLOCKS
    mesh.away(module, "m", lent=60)
    torch.testing.assert_close(mesh.home.read_blocks(names), expected)
    begin(mesh.home, generation(PROMPT, "again"))
    step = mesh.home.step()
    assert step.num_tokens == len(PROMPT) - 7 * SIZE
    assert step.tokens[0].num_cached_tokens == 7 * SIZE
    mesh.back("m")
    torch.testing.assert_close(mesh.home.read_blocks(names), expected)
    assert [step.tokens[0].token_id, *drain(mesh.home).tokens["again"]] == [*_with(first_token(PROMPT))]


def _with(parts: tuple[int, list[int]]) -> list[int]:
    return [parts[0], *parts[1]]


def test_the_way_home_into_fewer_blocks_preempts_the_youngest_and_loses_nothing() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=40))
    mesh.away(heads_of(0, 4, (0, 1)), "m")
    assert mesh.home.load().num_blocks == 120
    asked = [generation(prompt_of(60 + one, one), f"s{one}", max_tokens=20) for one in range(10)]
    for one in asked:
        begin(mesh.home, one)

    def between(number: int) -> None:
        if number == 14:
            assert mesh.home.load().num_used_blocks > 60
            assert mesh.back("m").num_blocks_after == 40
            assert mesh.home.load().num_used_blocks <= 40
            oldest, youngest = mesh.home.sequences.by_age[0], mesh.home.sequences.by_age[-1]
            assert oldest.blocks
            assert not youngest.blocks

    told = drain(mesh.home, between)
    plain = core_of(model_of("gqa"))
    for one in asked:
        begin(plain, one)
    assert told.failed == {}
    assert told.tokens == drain(plain).tokens
    check_baseline(mesh.home)


def test_a_way_home_waits_while_reserved_sequences_hold_more_than_fits() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=40))
    mesh.away(heads_of(0, 4, (0, 1)), "m")
    hold(mesh, 30)
    assert (
        mesh.home.sequences.reserve(generation(prompt_of(159, 2), "more"), "more", whole_prompt=True)
        is not None
    )
    mesh.begin_return("m")
    with pytest.raises(NotYet):
        mesh.switch("m")
    mesh.home.sequences.abort("more")
    assert mesh.switch("m").num_blocks_after == 40


def test_moves_that_cannot_be_are_refused_and_change_nothing() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    placed = mesh.place(heads_of(0, 4, (1,)), "few")
    refused = PlacedModule(move_id="few", module=placed.module, worker="host", num_blocks=31)
    begin = mesh.home.migrator.begin
    host = mesh.host("host")
    with pytest.raises(MoveRefused, match="31 blocks; a sequence needs 32"):
        begin(refused, host, None)
    all_layers = PlacedModule(move_id="all", module=whole_layers(0, 4), worker="host", num_blocks=400)
    with pytest.raises(BadPlacement, match="at least one"):
        begin(all_layers, host, None)
    with pytest.raises(MoveRefused, match="no module"):
        mesh.begin_return("few")
    with pytest.raises(MoveRefused, match="weights travel"):
        begin(placed, host, mesh.home.model)
    assert mesh.home.placement.epoch == 0
    assert not mesh.home.migrator.is_under_way


def test_a_host_with_fewer_blocks_than_home_limits_the_blocks_until_the_move_ends() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=100))
    mesh.place(heads_of(0, 4, (1,)), "m")
    placed = PlacedModule(move_id="m", module=heads_of(0, 4, (1,)), worker="host", num_blocks=50)
    mesh.home.migrator.begin(placed, mesh.host("host"), None)
    assert mesh.home.load().num_blocks == 50
    mesh.home.migrator.cancel("m")
    mesh.home.step()
    assert mesh.home.load().num_blocks == 100


@pytest.mark.parametrize("stays", [whole_layers(0, 1), heads_of(0, 2, (0, 2))], ids=repr)
def test_blocks_get_other_ids_here_and_at_hosts_that_stay(stays: Module) -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=40, prefix_cache=False))
    mesh.away(whole_layers(2, 4), "goes", "a")
    mesh.away(stays, "stays", "b")
    early = [generation(prompt_of(60, one), f"early{one}", max_tokens=2) for one in range(6)]
    late = [generation(prompt_of(88, one), f"late{one}", max_tokens=20) for one in range(2)]
    for one in [*early, *late]:
        begin(mesh.home, one)
    moved: list[dict[int, int]] = []

    def between(number: int) -> None:
        blocks = [block for one in mesh.home.sequences.by_age for block in one.blocks]
        if number == 13:
            mesh.back("goes")
            moved.append(
                dict(zip(blocks, [b for one in mesh.home.sequences.by_age for b in one.blocks], strict=True))
            )

    told = drain(mesh.home, between)
    assert [max(ids) >= mesh.home.load().num_blocks and ids[max(ids)] < max(ids) for ids in moved] == [True]
    plain = core_of(model_of("gqa"))
    for one in [*early, *late]:
        begin(plain, one)
    assert told.tokens == drain(plain).tokens
