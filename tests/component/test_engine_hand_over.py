"""KV that leaves one engine and enters another, and what may then not be touched."""

import pytest
import torch
from engine_harness import (
    BLOCK_BYTES,
    SIZE,
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

from libs.engine.core import EngineCore
from libs.engine.outputs import LayerOutput, TokenOutput
from libs.kv.names import block_names
from libs.model.model import Model
from libs.request.generation import Generation
from libs.request.outcome import FinishReason


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def hand_over(
    prefill: EngineCore, decode: EngineCore, outputs: list[LayerOutput], asked: Generation
) -> list[TokenOutput]:
    """Prefill here, decode there; the tokens in order."""
    assert decode.sequences.reserve(asked, asked.request_id, whole_prompt=True) is not None
    assert prefill.sequences.reserve(asked, asked.request_id, whole_prompt=False) is not None
    prefill.sequences.begin(asked.request_id, num_computed_tokens=0, hand_over=True)
    first: list[TokenOutput] = []
    while not first:
        first = prefill.step().prompts_done
        while outputs:
            output = outputs.pop(0)
            assert decode.incoming.write(output.sequence_id, output.layer, output.first_block, output.blocks)
            prefill.budget.release(output)
    assert decode.sequences.start_decode(asked.request_id, first[0]) is None
    return first + drain(decode).get(asked.request_id, [])


@pytest.mark.parametrize("hand_over_bytes", [1, 3000, 10**9])
def test_prefill_here_and_decode_there_equals_one_engine(model: Model, hand_over_bytes: int) -> None:
    outputs: list[LayerOutput] = []
    prefill = engine(
        model, on_layers=outputs.extend, hand_over_bytes=hand_over_bytes, max_num_batched_tokens=12
    )
    decode = engine(model)
    for kind, length in enumerate((1, 4, 7, 8, 25, 25, 40)):
        asked = generation(
            prompt_of(length, min(kind, 5)), f"r{kind}", temperature=0.7 * (kind % 2), seed=kind
        )
        told = hand_over(prefill, decode, outputs, asked)
        assert ids(told) == alone(model, asked)
        assert [token.index for token in told] == list(range(12))
    again = hand_over(prefill, decode, outputs, generation(prompt_of(40, 5), "again"))
    assert again[0].num_cached_tokens == 36, "found at the prefill engine, and handed over all the same"
    assert ids(again) == alone(model, generation(prompt_of(40, 5)))
    check_baseline(prefill)
    check_baseline(decode)
    assert prefill.budget.out_bytes == 0


def test_hand_overs_stay_within_their_budget(model: Model) -> None:
    outputs: list[LayerOutput] = []
    core = engine(model, on_layers=outputs.extend, hand_over_bytes=3 * BLOCK_BYTES + 1)
    for kind in range(3):
        begin(core, generation(prompt_of(30, kind), f"r{kind}"), hand_over=True)
    num_done = 0
    while num_done < 3:
        step = core.step()
        num_done += len(step.prompts_done)
        assert core.budget.out_bytes <= 3 * BLOCK_BYTES
        if step.is_idle:
            assert outputs, "stuck with nothing on its way"
            core.budget.release(outputs.pop(0))


def test_a_chunk_that_fills_no_block_and_is_found_whole_hands_over_nothing_yet(model: Model) -> None:
    calls: list[list[LayerOutput]] = []
    core = engine(model, on_layers=calls.append, max_num_batched_tokens=SIZE - 1)
    late = generation(prompt_of(30), "late")
    assert core.sequences.reserve(late, "late", whole_prompt=True) is not None
    begin(core, generation(prompt_of(30), "early"), hand_over=True)
    drain(core)
    calls.clear()
    core.sequences.begin("late", num_computed_tokens=0, hand_over=True)
    (told,) = drain(core)["late"]
    assert told.num_cached_tokens == 28
    assert all(calls)
    assert sum(len(output.blocks) for call in calls for output in call) == 2 * 8


def test_a_first_token_that_ends_the_sequence_only_frees_at_the_decode_engine(model: Model) -> None:
    outputs: list[LayerOutput] = []
    prefill, decode = engine(model, on_layers=outputs.extend), engine(model)
    told = hand_over(prefill, decode, outputs, generation(prompt_of(9), max_tokens=1))
    assert [token.finish for token in told] == [FinishReason.LENGTH]
    check_baseline(decode)


def test_kv_found_elsewhere_is_written_and_only_the_rest_computed(model: Model) -> None:
    outputs: list[LayerOutput] = []
    source = engine(model, on_layers=outputs.extend)
    begin(source, generation(prompt_of(22), "s"), hand_over=True)
    drain(source)
    core, asked = engine(model), generation(prompt_of(22))
    assert core.sequences.reserve(asked, "r", whole_prompt=True) is not None
    for output in outputs:
        assert core.incoming.write("r", output.layer, output.first_block, output.blocks[:3])
    core.sequences.begin("r", num_computed_tokens=12)
    told = drain(core)["r"]
    assert ids(told) == alone(model, asked)
    assert told[0].num_cached_tokens == 12
    held = core.read_blocks(core_names(model, prompt_of(22)))
    assert held.shape == (5, 2, 2, 2, SIZE, 16)
    assert torch.allclose(held[:, 1], torch.cat([o.blocks for o in outputs if o.layer == 1])[:5], atol=1e-6)


def core_names(model: Model, tokens: list[int]) -> list[bytes]:
    return block_names(tokens, SIZE, model.fingerprint, "")


def test_blocks_that_others_share_are_never_written(model: Model) -> None:
    core = engine(model)
    begin(core, generation(prompt_of(18), "first"))
    drain(core)
    before = core.read_blocks(core_names(model, prompt_of(18)))
    assert core.sequences.reserve(generation(prompt_of(18), "r"), "r", whole_prompt=True) is not None
    garbage = torch.full((5, 2, 2, SIZE, 16), 9.0)
    assert core.incoming.write("r", 0, 0, garbage)
    assert torch.equal(core.read_blocks(core_names(model, prompt_of(18))), before)
