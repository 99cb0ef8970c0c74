"""What the engine's core refuses, fails or counts."""

import math

import pytest
import torch
from engine_harness import (
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

from kernels.paged_attention.reference import ReferenceAttention
from libs.engine.errors import (
    BadBlocks,
    DuplicateSequence,
    InvalidSequence,
    PromptTooLong,
    UnknownSequence,
    WrongState,
)
from libs.engine.outputs import TokenOutput
from libs.model.model import Model
from libs.request.outcome import FailureReason
from tests.bench.engine import engine_rates


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def test_what_cannot_be_is_refused_by_name(model: Model) -> None:
    core = engine(model, num_blocks=8)
    with pytest.raises(PromptTooLong) as long:
        core.sequences.reserve(generation(prompt_of(32)), "r", whole_prompt=True)
    assert (long.value.num_tokens, long.value.limit) == (32, 32)
    with pytest.raises(PromptTooLong):
        engine(model, max_model_len=9).sequences.reserve(generation(prompt_of(9)), "r", whole_prompt=False)
    for wrong in ([], [60], [-1, 3]):
        with pytest.raises(InvalidSequence):
            core.sequences.reserve(generation(wrong), "r", whole_prompt=True)
    with pytest.raises(InvalidSequence, match="NaN"):
        core.sequences.reserve(generation([1], deadline=math.nan), "r", whole_prompt=True)
    assert core.sequences.reserve(generation(prompt_of(9)), "r", whole_prompt=True) is not None
    with pytest.raises(DuplicateSequence):
        core.sequences.reserve(generation(prompt_of(9)), "r", whole_prompt=True)
    good = torch.zeros(1, 2, 2, SIZE, 16)
    for layer, first_block, blocks in (
        (2, 0, good),
        (0, 3, good),
        (0, -1, good),
        (0, 0, good.half()),
        (0, 0, good[0]),
    ):
        with pytest.raises(BadBlocks):
            core.incoming.write("r", layer, first_block, blocks)
    for num_computed_tokens in (-1, 10):
        with pytest.raises(BadBlocks):
            core.sequences.begin("r", num_computed_tokens=num_computed_tokens)
    with pytest.raises(WrongState):
        core.sequences.start_decode("r", TokenOutput("r", 3, 5))
    with pytest.raises(UnknownSequence):
        core.sequences.begin("nobody", num_computed_tokens=0)
    core.sequences.begin("r", num_computed_tokens=0)
    assert not core.incoming.write("r", 0, 0, good), "begun already"
    assert not core.incoming.write("nobody", 0, 0, good)
    with pytest.raises(WrongState):
        core.sequences.begin("r", num_computed_tokens=0)
    core.sequences.abort("r")
    core.sequences.abort("r")
    check_baseline(core)


def test_no_room_now_is_none_and_later_there_is(model: Model) -> None:
    core = engine(model, num_blocks=8)
    assert core.sequences.reserve(generation(prompt_of(20), "a"), "a", whole_prompt=True) is not None
    assert core.sequences.reserve(generation(prompt_of(12), "b"), "b", whole_prompt=True) is None
    core.sequences.abort("a")
    assert core.sequences.reserve(generation(prompt_of(12), "b"), "b", whole_prompt=True) is not None


def test_a_passed_deadline_fails_a_sequence_in_any_state(model: Model) -> None:
    now = 100.0
    core = engine(model, clock=lambda: now)
    begin(core, generation(prompt_of(5), "runs", deadline=150.0, max_tokens=99))
    begin(core, generation(prompt_of(5), "goes on", deadline=1000.0))
    assert (
        core.sequences.reserve(generation(prompt_of(5), "held", deadline=150.0), "held", whole_prompt=True)
        is not None
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
    assert core.sequences.reserve(generation(prompt_of(6), "b"), "b", whole_prompt=True) is not None
    attention.is_broken = True
    (failure,) = core.step().failed
    assert (failure.sequence_id, failure.reason) == ("a", FailureReason.INTERNAL)
    assert "on fire" in failure.detail
    attention.is_broken = False
    core.sequences.begin("b", num_computed_tokens=0)
    assert ids(drain(core)["b"]) == alone(model, generation(prompt_of(6)))
    check_baseline(core)


def test_the_load_counts_what_is_held_and_waited_for(model: Model) -> None:
    core = engine(model, max_num_batched_tokens=10)
    begin(core, generation(prompt_of(8), "runs", max_tokens=50))
    core.step()
    begin(core, generation(prompt_of(30, 1), "waits"))
    assert core.sequences.reserve(generation(prompt_of(9, 2), "held"), "held", whole_prompt=True) is not None
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_reserved) == (1, 1, 1)
    assert load.num_waiting_tokens == 30
    assert (load.num_blocks, load.num_used_blocks, load.block_size) == (64, 3 + 8 + 3, SIZE)
    for name in ("runs", "waits", "held"):
        core.sequences.abort(name)
    assert core.sequences.allocator.names()
    assert core.load().num_used_blocks == 0, "blocks only kept by name are free"


def test_the_measurement_measures(model: Model) -> None:
    rates = engine_rates(
        model, num_seqs=(1, 3), num_context_tokens=12, num_prompt_tokens=30, num_steps=4, num_repeats=1
    )
    assert set(rates.decode_tokens_per_second) == {1, 3}
    assert min(*rates.decode_tokens_per_second.values(), rates.prefill_tokens_per_second) > 0
