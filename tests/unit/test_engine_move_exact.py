"""Modules move away and back while sequences decode: the tokens are those of the unmoved run."""

import pytest
from engine_moves import Mesh, begin, check_baseline, core_of, drain, generation, model_of, prompt_of

from libs.placement.module import Module, heads_of, whole_layers
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
