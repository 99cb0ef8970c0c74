"""KV that comes while its sequence runs: the tokens are those of a run that computed everything."""

import pytest
import torch
from engine_harness import (
    alone,
    begin,
    check_baseline,
    drain,
    engine,
    generation,
    ids,
    prompt_of,
    tiny_model,
)

from libs.engine.engine_core import EngineCore
from libs.engine.outputs import LayerOutput
from libs.model.model import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def kv_of(model: Model, prompt: list[int]) -> dict[int, torch.Tensor]:
    """KV of all blocks of a prompt, by layer."""
    outputs: list[LayerOutput] = []
    core = engine(model, on_layers=outputs.extend)
    begin(core, generation(prompt), hand_over=True)
    drain(core)
    layers: dict[int, list[torch.Tensor]] = {}
    for output in outputs:
        layers.setdefault(output.layer, []).append(output.blocks)
    return {layer: torch.cat(blocks) for layer, blocks in layers.items()}


def load(core: EngineCore, name: str, layer: int, kv: dict[int, torch.Tensor], first: int, end: int) -> bool:
    return core.write_blocks(name, layer, first, kv[layer][first:end])


def test_a_layer_is_computed_when_it_is_whole_and_the_engine_rests_in_between(model: Model) -> None:
    core, asked, kv = engine(model), generation(prompt_of(30)), kv_of(model, prompt_of(30))
    assert core.reserve(asked, "r", whole_prompt=True) is not None
    core.begin("r", num_computed_tokens=24, awaits_kv=True)
    assert core.step().is_idle
    assert load(core, "r", 0, kv, 2, 6)
    assert core.step().is_idle
    assert load(core, "r", 0, kv, 0, 2)
    assert not core.step().is_idle
    assert core.step().is_idle
    assert not core.ledger.allocator.names()
    assert load(core, "r", 1, kv, 0, 6)
    told = drain(core)["r"]
    assert ids(told) == alone(model, asked)
    assert told[0].num_cached_tokens == 24
    check_baseline(core)
