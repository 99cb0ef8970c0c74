"""Whatever is batched with what, in whatever chunks: the tokens are those of one sequence computed alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention.reference import ReferenceAttention
from libs.engine.bench import measure_engine
from libs.engine.engine_core import EngineCore, StepOutput
from libs.engine.errors import (
    BadBlocks,
    DuplicateSequence,
    InvalidSequence,
    PromptTooLong,
    UnknownSequence,
    WrongState,
)
from libs.engine.outputs import LayerOutput, TokenOutput
from libs.engine.settings import EngineSettings
from libs.kv.names import block_names
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.model.random_model import random_model
from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FailureReason, FinishReason
from libs.request.sampling import SamplingParams

CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=60,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    eos_token_ids=(0,),
)
SIZE = 4


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
    return random_model(CONFIG, seed=4, dtype=torch.float32)


def generation(
    prompt: list[int],
    name: str = "r",
    output: list[int] | None = None,
    deadline: float = math.inf,
    **sampling: object,
) -> Generation:
    asked = SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
    return Generation(name, pack_token_ids(prompt + (output or [])), len(prompt), asked, "g", deadline)


def engine(model: Model, **sizes: object) -> EngineCore:
    asked = {
        "max_model_len": 128,
        "num_blocks": 64,
        "block_size": SIZE,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
    }
    options = {key: sizes.pop(key) for key in ("clock", "attention", "on_layers") if key in sizes}
    return EngineCore(model, EngineSettings(**(asked | sizes)), **options)  # type: ignore[arg-type]


def prompt_of(length: int, kind: int = 0) -> list[int]:
    return [(7 * place + 13 * kind + place * place) % 59 + 1 for place in range(length)]


def begin(core: EngineCore, asked: Generation, **more: object) -> None:
    assert core.reserve(asked, asked.request_id, whole_prompt=True) is not None
    core.begin(asked.request_id, num_computed_tokens=0, **more)  # type: ignore[arg-type]


def drain(
    core: EngineCore, each: Callable[[StepOutput], None] = lambda _: None
) -> dict[str, list[TokenOutput]]:
    """Steps until there is nothing to do; the tokens of each sequence."""
    told: dict[str, list[TokenOutput]] = {}
    for _ in range(5000):
        step = core.step()
        each(step)
        for token in (*step.tokens, *step.prompts_done):
            told.setdefault(token.sequence_id, []).append(token)
        if step.is_idle:
            return told
    raise AssertionError("the engine does not come to rest")


def ids(tokens: list[TokenOutput]) -> list[int]:
    return [token.token_id for token in tokens]


def alone(model: Model, asked: Generation) -> list[int]:
    """The engine with this sequence only, everything in one chunk, no cache."""
    core = engine(model, max_num_batched_tokens=512, prefix_cache=False)
    begin(core, asked)
    return ids(drain(core)[asked.request_id])


def dense(model: Model, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens by the whole sequence anew for each token, with torch's own attention."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        hidden = model.embed(torch.tensor(tokens))
        rotary = model.rotary(torch.arange(len(tokens)))
        for layer in range(CONFIG.num_layers):
            q, k, v = (x.transpose(0, 1)[None] for x in model.attention_inputs(layer, hidden, rotary))
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            hidden = model.attention_output(layer, hidden, attended[0].transpose(0, 1))
            hidden = model.mlp(layer, hidden)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def check_baseline(core: EngineCore) -> None:
    ledger = core.ledger
    assert ledger.allocator.num_used == 0
    assert not ledger.sequences
    assert not ledger.by_age
    assert ledger.rows.num_taken == 0


def test_greedy_tokens_are_those_of_dense_attention(model: Model) -> None:
    for length in (1, 3, 4, 5, 31, 40):
        assert alone(model, generation(prompt_of(length))) == dense(model, prompt_of(length), 12), length


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_block_sizes_change_no_token_whichever_attention_takes_them(model: Model, block_size: int) -> None:
    core = engine(model, block_size=block_size, num_blocks=640 // block_size, max_num_batched_tokens=20)
    asked = [generation(prompt_of(17 + 5 * kind, kind), f"r{kind}") for kind in range(4)]
    for one in asked:
        begin(core, one)
    told = drain(core)
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)


@pytest.mark.parametrize("num_batched_tokens", [1, 3, 7, 16, 64])
def test_chunks_and_company_change_no_token(model: Model, num_batched_tokens: int) -> None:
    core = engine(model, max_num_batched_tokens=num_batched_tokens)
    asked = [generation(prompt_of(3 + 6 * kind, kind), f"r{kind}") for kind in range(6)]
    for one in asked:
        begin(core, one)
    told = drain(core)
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)
        assert [token.index for token in told[one.request_id]] == list(range(12))
        assert [token.finish for token in told[one.request_id]][-2:] == [None, FinishReason.LENGTH]
    check_baseline(core)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_preempted_sequences_lose_and_repeat_nothing(model: Model, data: st.DataObject) -> None:
    core = engine(
        model,
        num_blocks=data.draw(st.integers(12, 24)),
        max_num_batched_tokens=data.draw(st.integers(4, 40)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        prefix_cache=data.draw(st.booleans()),
    )
    asked = [
        generation(
            prompt_of(data.draw(st.integers(1, 20)), data.draw(st.integers(0, 2))),
            f"r{number}",
            max_tokens=data.draw(st.integers(1, 24)),
            temperature=data.draw(st.sampled_from([0.0, 0.9])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.4])),
            seed=number,
        )
        for number in range(6)
    ]
    told: dict[str, list[TokenOutput]] = {}
    waiting = list(asked)
    while waiting:
        if core.reserve(waiting[0], waiting[0].request_id, whole_prompt=data.draw(st.booleans())) is not None:
            core.begin(waiting.pop(0).request_id, num_computed_tokens=0)
        for token in core.step().tokens:
            told.setdefault(token.sequence_id, []).append(token)
    for name, tokens in drain(core).items():
        told.setdefault(name, []).extend(tokens)
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)
    check_baseline(core)


def test_sequences_that_outgrow_the_pool_together_all_end_right(model: Model) -> None:
    core = engine(model, num_blocks=14)
    asked = [generation(prompt_of(6, kind), f"r{kind}", max_tokens=30) for kind in range(4)]
    for one in asked:
        begin(core, one)
    preempted = 0

    def count(_: StepOutput) -> None:
        nonlocal preempted
        preempted += core.ledger.load().num_waiting

    told = drain(core, count)
    assert preempted, "the pool is too small for all at once"
    for one in asked:
        assert ids(told[one.request_id]) == alone(model, one)
    check_baseline(core)


def test_one_that_outgrows_the_whole_pool_ends_with_length(model: Model) -> None:
    core = engine(model, num_blocks=5)
    begin(core, generation(prompt_of(6), max_tokens=100))
    told = drain(core)["r"]
    assert 6 + len(told) == 5 * SIZE
    assert told[-1].finish is FinishReason.LENGTH
    assert ids(told) == alone(model, generation(prompt_of(6), max_tokens=100))[: len(told)]
    check_baseline(core)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.2, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0, "presence_penalty": 1.5, "min_tokens": 9, "ignore_eos": False},
    ],
)
def test_a_replay_continues_the_same_text(model: Model, sampling: dict[str, Any]) -> None:
    prompt = prompt_of(9)
    whole = alone(model, generation(prompt, **sampling))
    for cut in range(1, len(whole)):
        core = engine(model)
        begin(core, generation(prompt, output=whole[:cut], **sampling))
        told = drain(core)["r"]
        assert ids(told) == whole[cut:]
        assert told[0].index == cut


def test_a_known_prefix_is_found_and_not_computed_again(model: Model) -> None:
    core = engine(model)
    begin(core, generation(prompt_of(18), "first"))
    first = drain(core)["first"]
    held = core.reserve(generation(prompt_of(18), "second"), "second", whole_prompt=True)
    assert held is not None
    assert held.num_cached_blocks == 4
    core.begin("second", num_computed_tokens=0)
    second = drain(core)["second"]
    assert ids(second) == ids(first)
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens, second[1].num_cached_tokens) == (
        0,
        16,
        0,
    )
    longer = generation(prompt_of(18) + ids(first)[:6], "third")
    held = core.reserve(longer, "third", whole_prompt=True)
    assert held is not None
    assert held.num_cached_blocks == 5, "output blocks are found too"
    core.abort("third")
    salted = Generation(
        "salt", pack_token_ids(prompt_of(18)), 18, SamplingParams(), "g", math.inf, cache_salt="x"
    )
    held = core.reserve(salted, "salt", whole_prompt=True)
    assert held is not None
    assert held.num_cached_blocks == 0, "another tenant finds nothing"
    core.abort("salt")
    check_baseline(core)


def test_a_prefix_computed_while_another_waits_is_found_when_that_starts(model: Model) -> None:
    core = engine(model, max_num_batched_tokens=20)
    for name in ("first", "second"):
        begin(core, generation(prompt_of(20), name))
    told = drain(core)
    assert ids(told["first"]) == ids(told["second"])
    assert told["second"][0].num_cached_tokens == 16


def hand_over(
    prefill: EngineCore, decode: EngineCore, outputs: list[LayerOutput], asked: Generation
) -> list[TokenOutput]:
    """Prefill here, decode there; the tokens in order."""
    assert decode.reserve(asked, asked.request_id, whole_prompt=True) is not None
    assert prefill.reserve(asked, asked.request_id, whole_prompt=False) is not None
    prefill.begin(asked.request_id, num_computed_tokens=0, hand_over=True)
    first: list[TokenOutput] = []
    while not first:
        first = prefill.step().prompts_done
        while outputs:
            output = outputs.pop(0)
            assert decode.write_blocks(output.sequence_id, output.layer, output.first_block, output.blocks)
            prefill.budget.release(output)
    assert decode.adopt(asked.request_id, first[0]) is None
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
    core = engine(model, on_layers=outputs.extend)
    block_bytes = core.pool.layout.block_bytes
    core.budget.set_limit(3 * block_bytes + 1)
    for kind in range(3):
        begin(core, generation(prompt_of(30, kind), f"r{kind}"), hand_over=True)
    num_done = 0
    while num_done < 3:
        step = core.step()
        num_done += len(step.prompts_done)
        assert core.budget.out_bytes <= 3 * block_bytes
        if step.is_idle:
            assert outputs, "stuck with nothing on its way"
            core.budget.release(outputs.pop(0))


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
    assert core.reserve(asked, "r", whole_prompt=True) is not None
    for output in outputs:
        assert core.write_blocks("r", output.layer, output.first_block, output.blocks[:3])
    core.begin("r", num_computed_tokens=12)
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
    assert core.reserve(generation(prompt_of(18), "r"), "r", whole_prompt=True) is not None
    garbage = torch.full((5, 2, 2, SIZE, 16), 9.0)
    assert core.write_blocks("r", 0, 0, garbage)
    assert torch.equal(core.read_blocks(core_names(model, prompt_of(18))), before)


def test_what_cannot_be_is_refused_by_name(model: Model) -> None:
    core = engine(model, num_blocks=8)
    with pytest.raises(PromptTooLong) as long:
        core.reserve(generation(prompt_of(32)), "r", whole_prompt=True)
    assert (long.value.num_tokens, long.value.limit) == (32, 32)
    with pytest.raises(PromptTooLong):
        engine(model, max_model_len=9).reserve(generation(prompt_of(9)), "r", whole_prompt=False)
    for wrong in ([], [60], [-1, 3]):
        with pytest.raises(InvalidSequence):
            core.reserve(generation(wrong), "r", whole_prompt=True)
    with pytest.raises(InvalidSequence, match="NaN"):
        core.reserve(generation([1], deadline=math.nan), "r", whole_prompt=True)
    assert core.reserve(generation(prompt_of(9)), "r", whole_prompt=True) is not None
    with pytest.raises(DuplicateSequence):
        core.reserve(generation(prompt_of(9)), "r", whole_prompt=True)
    good = torch.zeros(1, 2, 2, SIZE, 16)
    for layer, first_block, blocks in (
        (2, 0, good),
        (0, 3, good),
        (0, -1, good),
        (0, 0, good.half()),
        (0, 0, good[0]),
    ):
        with pytest.raises(BadBlocks):
            core.write_blocks("r", layer, first_block, blocks)
    for num_computed_tokens in (-1, 10):
        with pytest.raises(BadBlocks):
            core.begin("r", num_computed_tokens=num_computed_tokens)
    with pytest.raises(WrongState):
        core.adopt("r", TokenOutput("r", 3, 5))
    with pytest.raises(UnknownSequence):
        core.begin("nobody", num_computed_tokens=0)
    core.begin("r", num_computed_tokens=0)
    assert not core.write_blocks("r", 0, 0, good), "begun already"
    assert not core.write_blocks("nobody", 0, 0, good)
    with pytest.raises(WrongState):
        core.begin("r", num_computed_tokens=0)
    core.abort("r")
    core.abort("r")
    check_baseline(core)


def test_no_room_now_is_none_and_later_there_is(model: Model) -> None:
    core = engine(model, num_blocks=8)
    assert core.reserve(generation(prompt_of(20), "a"), "a", whole_prompt=True) is not None
    assert core.reserve(generation(prompt_of(12), "b"), "b", whole_prompt=True) is None
    core.abort("a")
    assert core.reserve(generation(prompt_of(12), "b"), "b", whole_prompt=True) is not None


def test_a_passed_deadline_fails_a_sequence_in_any_state(model: Model) -> None:
    now = 100.0
    core = engine(model, clock=lambda: now)
    begin(core, generation(prompt_of(5), "runs", deadline=150.0, max_tokens=99))
    begin(core, generation(prompt_of(5), "goes on", deadline=1000.0))
    assert (
        core.reserve(generation(prompt_of(5), "held", deadline=150.0), "held", whole_prompt=True) is not None
    )
    assert core.seconds_to_deadline() == 50.0
    assert not core.step().failed
    now = 150.0
    failed = core.step().failed
    assert {(failure.sequence_id, failure.reason) for failure in failed} == {
        ("runs", FailureReason.DEADLINE),
        ("held", FailureReason.DEADLINE),
    }
    drain(core)
    assert core.seconds_to_deadline() is None
    check_baseline(core)


def test_an_error_in_a_step_fails_its_sequences_and_no_other(model: Model) -> None:
    class Breaking(ReferenceAttention):
        is_broken = False

        def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
            if self.is_broken:
                raise RuntimeError("the device is on fire")
            super().write_kv(k, v, kv, slots)

    attention = Breaking()
    core = engine(model, attention=attention)
    begin(core, generation(prompt_of(5), "a"))
    assert core.reserve(generation(prompt_of(6), "b"), "b", whole_prompt=True) is not None
    attention.is_broken = True
    (failure,) = core.step().failed
    assert (failure.sequence_id, failure.reason) == ("a", FailureReason.INTERNAL)
    assert "on fire" in failure.detail
    attention.is_broken = False
    core.begin("b", num_computed_tokens=0)
    assert ids(drain(core)["b"]) == alone(model, generation(prompt_of(6)))
    check_baseline(core)


def test_the_load_counts_what_is_held_and_waited_for(model: Model) -> None:
    core = engine(model, max_num_batched_tokens=10)
    begin(core, generation(prompt_of(8), "runs", max_tokens=50))
    core.step()
    begin(core, generation(prompt_of(30, 1), "waits"))
    assert core.reserve(generation(prompt_of(9, 2), "held"), "held", whole_prompt=True) is not None
    load = core.ledger.load()
    assert (load.num_running, load.num_waiting, load.num_reserved) == (1, 1, 1)
    assert load.num_waiting_tokens == 30
    assert (load.num_blocks, load.num_used_blocks, load.block_size) == (64, 3 + 8 + 3, SIZE)
    for name in ("runs", "waits", "held"):
        core.abort(name)
    assert core.ledger.allocator.num_named > 0
    assert core.ledger.load().num_used_blocks == 0, "blocks only kept by name are free"


def test_the_measurement_measures(model: Model) -> None:
    rates = measure_engine(
        model, num_seqs=(1, 3), num_context_tokens=12, num_prompt_tokens=30, num_steps=4, num_repeats=1
    )
    assert set(rates.decode_tokens_per_second) == {1, 3}
    assert min(*rates.decode_tokens_per_second.values(), rates.prefill_tokens_per_second) > 0
