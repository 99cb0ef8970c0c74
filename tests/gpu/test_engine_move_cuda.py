"""Modules move between two engines on a CUDA device: the tokens are those of the unmoved run on the CPU."""

import math

import pytest
import torch
from memory_host import synchronous_host
from random_model import _RandomCheckpoint

from libs.engine.core import EngineCore
from libs.engine.settings import EngineSettings
from libs.model.assemble import assemble
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import PlacedModule
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=4,
    hidden_size=64,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    intermediate_size=96,
    vocab_size=300,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    eos_token_ids=(0,),
)


def core_on(device: str, name: str) -> EngineCore:
    weights = assemble(CONFIG, _RandomCheckpoint(CONFIG, 4), dtype=torch.float32, device=torch.device(device))
    sizes = EngineSettings(max_model_len=128, num_blocks=60, block_size=16, max_num_batched_tokens=48)
    return EngineCore(Model(CONFIG, weights, fingerprint="random"), sizes, home=name)


def begin(core: EngineCore) -> None:
    for number in range(4):
        prompt = [(7 * place + 13 * number) % 299 + 1 for place in range(9 + 17 * number)]
        sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        name = f"r{number}"
        asked = Generation(name, pack_token_ids(prompt), len(prompt), sampling, "g", math.inf)
        assert core.sequences.reserve(asked, name, whole_prompt=True) is not None
        core.sequences.begin(name, num_computed_tokens=0)


def step(core: EngineCore, told: dict[str, list[int]]) -> bool:
    done = core.step()
    assert not done.failed
    for token in done.tokens:
        told.setdefault(token.sequence_id, []).append(token.token_id)
    return done.is_idle


@pytest.mark.parametrize("module", [whole_layers(1, 3), heads_of(0, 4, (0, 2)), remote_blocks(4)], ids=repr)
def test_tokens_do_not_change_when_a_module_moves_back_and_forth(module: Module) -> None:
    expected: dict[str, list[int]] = {}
    plain = core_on("cpu", "plain")
    begin(plain)
    while not step(plain, expected):
        pass
    home, host = core_on("cuda", "home"), core_on("cuda", "host")
    told: dict[str, list[int]] = {}
    begin(home)
    for number in range(5):
        move_id = f"m{number}"
        granted = host.hosted.open("home", move_id, module, num_blocks_wanted=60, num_blocks_least=8)
        placed = PlacedModule(move_id=move_id, module=module, worker="host", num_blocks=granted)
        way = synchronous_host("host", "home", host.hosted)
        home.migrator.begin(placed, way, None)
        step(home, told)
        home.migrator.switch(move_id)
        step(home, told)
        home.migrator.begin_return(move_id, None)
        step(home, told)
        home.migrator.switch(move_id)
        host.hosted.close("home", move_id)
    while not step(home, told):
        pass
    assert told == expected
