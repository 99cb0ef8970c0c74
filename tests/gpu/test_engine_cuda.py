"""The same engine on a CUDA device: same tokens as on the CPU in float32."""

import math

import pytest
import torch
from random_model import _RandomCheckpoint

from libs.engine.core import EngineCore
from libs.engine.outputs import LayerOutput
from libs.engine.settings import EngineSettings
from libs.model.assemble import assemble
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=300,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    eos_token_ids=(0,),
)


def model_on(device: str) -> Model:
    weights = assemble(CONFIG, _RandomCheckpoint(CONFIG, 4), dtype=torch.float32, device=torch.device(device))
    return Model(CONFIG, weights, fingerprint="random")


def core_on(device: str, outputs: list[LayerOutput] | None = None) -> EngineCore:
    sizes = EngineSettings(max_model_len=256, num_blocks=40, block_size=16, max_num_batched_tokens=48)
    return EngineCore(model_on(device), sizes, on_layers=(outputs if outputs is not None else []).extend)


def generation(number: int, temperature: float = 0.0) -> Generation:
    prompt = [(7 * place + 13 * number) % 299 + 1 for place in range(9 + 17 * number)]
    sampling = SamplingParams(
        max_tokens=20, temperature=temperature, ignore_eos=True, top_p=0.9, frequency_penalty=0.2, logprobs=2
    )
    return Generation(f"r{number}", pack_token_ids(prompt), len(prompt), sampling, "g", math.inf)


def run(core: EngineCore) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    while not (step := core.step()).is_idle:
        assert not step.failed
        for token in step.tokens:
            told.setdefault(token.sequence_id, []).append(token.token_id)
    return told


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_on_the_gpu_gives_the_tokens_of_the_cpu(temperature: float) -> None:
    told: dict[str, dict[str, list[int]]] = {}
    for device in ("cpu", "cuda"):
        core = core_on(device)
        for number in range(5):
            asked = generation(number, temperature)
            assert core.sequences.reserve(asked, asked.request_id, whole_prompt=True) is not None
            core.sequences.begin(asked.request_id, num_computed_tokens=0)
        told[device] = run(core)
        assert core.sequences.allocator.num_used == 0
    assert told["cuda"] == told["cpu"]


def test_kv_goes_from_a_gpu_engine_to_another() -> None:
    outputs: list[LayerOutput] = []
    prefill, decode, asked = core_on("cuda", outputs), core_on("cuda"), generation(4)
    for core in (prefill, decode):
        assert core.sequences.reserve(asked, "r4", whole_prompt=True) is not None
    prefill.sequences.begin("r4", num_computed_tokens=0, hand_over=True)
    while not (step := prefill.step()).prompts_done:
        assert not step.failed
    for output in outputs:
        assert decode.incoming.write("r4", output.layer, output.first_block, output.blocks.cpu())
    decode.sequences.start_decode("r4", step.prompts_done[0])
    alone = core_on("cuda")
    assert alone.sequences.reserve(asked, "r4", whole_prompt=True) is not None
    alone.sequences.begin("r4", num_computed_tokens=0)
    assert [step.prompts_done[0].token_id, *run(decode)["r4"]] == run(alone)["r4"]


def test_kv_arrives_on_the_gpu_while_its_prompt_runs() -> None:
    outputs: list[LayerOutput] = []
    source, core, alone = core_on("cuda", outputs), core_on("cuda"), core_on("cuda")
    asked, num_awaited = generation(4), 4
    for one in (source, core, alone):
        assert one.sequences.reserve(asked, "r4", whole_prompt=True) is not None
    source.sequences.begin("r4", num_computed_tokens=0, hand_over=True)
    while not source.step().prompts_done:
        pass
    alone.sequences.begin("r4", num_computed_tokens=0)
    core.sequences.begin("r4", num_computed_tokens=num_awaited * 16, awaits_kv=True)
    told: list[int] = []
    for output in sorted(outputs, key=lambda one: (one.layer, -one.first_block)):
        blocks = output.blocks[: num_awaited - output.first_block]
        assert core.incoming.write("r4", output.layer, output.first_block, blocks.cpu())
        told += [token.token_id for token in core.step().tokens]
    assert told + run(core)["r4"] == run(alone)["r4"]
