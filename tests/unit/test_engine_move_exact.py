"""Modules move away and back while sequences decode: the tokens are those of the unmoved run."""

from collections.abc import Callable

import pytest
from engine_moves import Mesh, begin, check_baseline, core_of, drain, generation, model_of, prompt_of

from libs.model.layer import layer_bytes
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.request.generation import Generation

SHAPES = ("gqa", "mha", "qk_norm")
MODULES = {
    "first layers": lambda heads: whole_layers(0, 2),
    "middle layers": lambda heads: whole_layers(1, 3),
    "last layers": lambda heads: whole_layers(2, 4),
    "first head": lambda heads: heads_of(0, 4, (0,)),
    "last heads": lambda heads: heads_of(0, 4, tuple(range(1, heads))),
    "middle head of some layers": lambda heads: heads_of(1, 3, (heads // 2,)),
}


def asked(num: int = 16) -> list[Generation]:
    return [
        generation(prompt_of(5 + 3 * one, one), f"s{one}", max_tokens=22, seed=one if one % 2 else None)
        for one in range(num)
    ]


def unmoved(shape: str, num: int = 16) -> dict[str, list[int]]:
    core = core_of(model_of(shape))
    for one in asked(num):
        begin(core, one)
    return drain(core).tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", MODULES)
def test_tokens_do_not_change_when_a_module_moves_at_every_step_boundary(shape: str, which: str) -> None:
    mesh = Mesh(core_of(model_of(shape)))
    module: Module = MODULES[which](mesh.home.model.config.num_kv_heads)
    for one in asked():
        begin(mesh.home, one)

    def between(number: int) -> None:
        if number % 2:
            mesh.back(f"m{number - 1}")
        else:
            mesh.away(module, f"m{number}")

    told = drain(mesh.home, between)
    assert told.failed == {}
    assert told.tokens == unmoved(shape)
    check_baseline(mesh.home)


@pytest.mark.parametrize("shape", [*SHAPES, "one_head"])
def test_tokens_do_not_change_when_blocks_are_lent_and_given_back(shape: str) -> None:
    mesh = Mesh(core_of(model_of(shape), num_blocks=84))
    for one in asked():
        begin(mesh.home, one)

    def between(number: int) -> None:
        if number % 4 == 1:
            mesh.away(remote_blocks(4), f"m{number}", lent=40)
        elif number % 4 == 0 and number:
            mesh.back(f"m{number - 3}")

    told = drain(mesh.home, between)
    assert told.failed == {}
    assert told.tokens == unmoved(shape)
    check_baseline(mesh.home)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_do_not_change_when_layers_move_with_their_weights(shape: str) -> None:
    mesh = Mesh(core_of(model_of(shape)))
    for one in asked():
        begin(mesh.home, one)

    def between(number: int) -> None:
        if number % 3 == 0:
            mesh.away(whole_layers(1, 3), f"m{number}", with_weights=True)
            assert list(mesh.home.model.weights.layers) == [0, 3]
        elif number % 3 == 1:
            mesh.back(f"m{number - 1}")

    told = drain(mesh.home, between)
    assert told.failed == {}
    assert told.tokens == unmoved(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_several_modules_are_away_at_once_and_come_back_in_any_order(shape: str) -> None:
    mesh = Mesh(core_of(model_of(shape)))
    for one in asked():
        begin(mesh.home, one)
    plan: dict[int, Callable[[], object]] = {
        1: lambda: mesh.away(whole_layers(3, 4), "end", "b"),
        2: lambda: mesh.away(heads_of(0, 2, (1,)), "head", "a"),
        3: lambda: mesh.away(whole_layers(2, 3), "middle", "a"),
        6: lambda: mesh.back("end"),
        7: lambda: mesh.away(heads_of(3, 4, (0,)), "other", "b"),
        9: lambda: mesh.back("head"),
        10: lambda: mesh.back("middle"),
        12: lambda: mesh.back("other"),
    }
    told = drain(mesh.home, lambda number: plan.get(number, lambda: None)())
    assert told.tokens == unmoved(shape)
    assert mesh.home.placement.placed == ()


@pytest.mark.parametrize("which", MODULES)
def test_steps_that_run_between_pieces_of_the_copy_are_copied_too(which: str) -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    module = MODULES[which](3)
    for one in asked():
        begin(mesh.home, one)

    def between(number: int) -> None:
        phase, count = number % 8, number // 8
        if phase == 0:
            mesh.begin(module, f"m{count}")
        elif phase == 3:
            mesh.switch(f"m{count}")
        elif phase == 4:
            mesh.begin_return(f"m{count}")
        elif phase == 7:
            mesh.switch(f"m{count}")
            mesh.hosts["host"].hosted.close("home", f"m{count}")
        else:
            left = mesh.home.migrator.copy_some(f"m{count}", 3 << 12).num_left_blocks
            assert left > 0

    assert drain(mesh.home, between).tokens == unmoved("gqa")


@pytest.mark.parametrize("which", MODULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_in_chunks_go_on_when_a_module_moves_between_chunks(shape: str, which: str) -> None:
    def run(mesh: Mesh, between: Callable[[int], object]) -> dict[str, list[int]]:
        for one in range(4):
            begin(mesh.home, generation(prompt_of(150 + one, one), f"s{one}", max_tokens=4))
        return drain(mesh.home, between).tokens

    mesh = Mesh(core_of(model_of(shape)))
    module = MODULES[which](mesh.home.model.config.num_kv_heads)

    def between(number: int) -> None:
        if number % 2:
            mesh.away(module, f"m{number}")
        elif number:
            mesh.back(f"m{number - 1}")

    expected = run(Mesh(core_of(model_of(shape))), lambda _: None)
    assert run(mesh, between) == expected


def test_prompts_in_chunks_see_blocks_that_are_lent() -> None:
    def run(mesh: Mesh, between: Callable[[int], object]) -> dict[str, list[int]]:
        for one in range(4):
            begin(mesh.home, generation(prompt_of(150 + one, one), f"s{one}", max_tokens=4))
        return drain(mesh.home, between).tokens

    expected = run(Mesh(core_of(model_of("one_head"))), lambda _: None)
    mesh = Mesh(core_of(model_of("one_head"), num_blocks=40))

    def between(number: int) -> None:
        if number == 1:
            mesh.away(remote_blocks(4), "lent", lent=60)

    assert run(mesh, between) == expected
    assert mesh.hosts["host"].hosted.hosted()[0].num_blocks == 60


def test_capacity_is_what_the_memory_holds_of_smaller_blocks_and_the_host_granted() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=120))
    heads = mesh.away(heads_of(0, 4, (1,)), "heads")
    assert (heads.num_blocks_before, heads.num_blocks_after) == (120, 120 * 3 // 2)
    back = mesh.back("heads")
    assert (back.num_blocks_before, back.num_blocks_after) == (180, 120)
    layers = mesh.away(whole_layers(1, 4), "layers")
    assert layers.num_blocks_after == 120 * 4
    assert mesh.home.load().num_blocks == 480
    mesh.back("layers")
    lent = mesh.away(remote_blocks(4), "lent", lent=7)
    assert lent.num_blocks_after == 127
    assert mesh.back("lent").num_blocks_after == 120


def test_weights_that_travel_make_room_for_blocks() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=120))
    model = mesh.home.model
    moved = mesh.away(whole_layers(1, 3), "m", with_weights=True)
    freed = sum(layer_bytes(model.layer(layer)) for layer in (1, 2))
    half_block_bytes = mesh.home.pool.layout.block_bytes
    assert moved.num_blocks_after == 240 + freed // half_block_bytes
    assert mesh.back("m").num_blocks_after == 120
