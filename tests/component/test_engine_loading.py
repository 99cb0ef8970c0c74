"""KV that comes while its sequence runs: the tokens are those of a run that computed everything."""

import asyncio
from random import Random

import pytest
import torch
from engine_harness import (
    SIZE,
    GatedAttention,
    Listener,
    alone,
    begin,
    check_baseline,
    drain,
    engine,
    generation,
    ids,
    kv_of,
    opened,
    prompt_of,
    reserve_and_begin,
    tiny_model,
)

from kernels.paged_attention.contract import AttentionBatch
from kernels.paged_attention.reference import ReferenceAttention
from libs.cost.prefill import DEFAULT_PREFILL_COST, prefill_seconds
from libs.engine.core import EngineCore
from libs.engine.engine import Engine
from libs.engine.errors import BadBlocks, WrongState
from libs.engine.settings import EngineSettings
from libs.kv.names import block_names
from libs.model.load import find_model, load_model
from libs.model.model import Model
from libs.model.tokenizer import load_tokenizer
from libs.request.outcome import FailureReason

NUM_AWAITED = 6
"""Blocks, of a prompt of 30 tokens."""


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def kv(model: Model) -> torch.Tensor:
    return kv_of(model, prompt_of(30))


def begin_loading(core: EngineCore, *, name: str = "r", **more: object) -> None:
    assert core.sequences.reserve(generation(prompt_of(30), name), name, whole_prompt=True) is not None
    core.sequences.begin(name, num_computed_tokens=NUM_AWAITED * SIZE, awaits_kv=True, **more)  # type: ignore[arg-type]


def test_a_layer_is_computed_when_it_is_whole_and_the_engine_rests_in_between(
    model: Model, kv: torch.Tensor
) -> None:
    core = engine(model)
    begin_loading(core)
    assert core.step().is_idle
    assert core.incoming.write("r", 0, 2, kv[0, 2:6])
    assert core.step().is_idle
    assert core.incoming.write("r", 0, 0, kv[0, :2])
    assert not core.step().is_idle
    assert core.step().is_idle
    assert not core.sequences.allocator.names()
    assert core.incoming.write("r", 1, 0, kv[1, :6])
    step = core.step()
    assert step.stored == block_names(prompt_of(30), SIZE, model.fingerprint, "")
    assert not core.incoming.write("r", 1, 0, kv[1, :6]), "nothing is awaited any more"
    told = step.tokens + drain(core)["r"]
    assert ids(told) == alone(model, generation(prompt_of(30)))
    assert told[0].num_cached_tokens == NUM_AWAITED * SIZE
    check_baseline(core)


def test_kv_that_is_there_at_once_needs_no_step_of_its_own(model: Model, kv: torch.Tensor) -> None:
    core = engine(model)
    assert core.sequences.reserve(generation(prompt_of(30)), "r", whole_prompt=True) is not None
    for layer in (1, 0):
        assert core.incoming.write("r", layer, 0, kv[layer, :NUM_AWAITED])
    core.sequences.begin("r", num_computed_tokens=NUM_AWAITED * SIZE, awaits_kv=True)
    assert len(core.sequences.allocator.names()) == NUM_AWAITED
    begin(core, generation(prompt_of(5, 1), "other"))
    assert len(core.step().tokens) == 2


def test_a_prompt_that_is_held_whole_computes_its_last_token_alone(model: Model) -> None:
    core, whole = engine(model), kv_of(model, prompt_of(24))
    assert core.sequences.reserve(generation(prompt_of(24)), "r", whole_prompt=True) is not None
    core.sequences.begin("r", num_computed_tokens=24, awaits_kv=True)
    for layer in (0, 1):
        assert core.incoming.write("r", layer, 0, whole[layer])
        step = core.step()
    assert (step.num_tokens, step.tokens[0].num_cached_tokens) == (1, 23)
    assert ids(step.tokens + drain(core)["r"]) == alone(model, generation(prompt_of(24)))


def test_others_run_while_one_waits_and_take_turns_with_it(model: Model, kv: torch.Tensor) -> None:
    core = engine(model)
    begin(core, generation(prompt_of(9, 1), "old"))
    begin_loading(core)
    assert ids(core.step().tokens) == alone(model, generation(prompt_of(9, 1)))[:1]
    for _ in range(3):
        assert [token.sequence_id for token in core.step().tokens] == ["old"]
    core.incoming.write("r", 0, 0, kv[0, :NUM_AWAITED])
    steps = [[token.sequence_id for token in core.step().tokens] for _ in range(3)]
    assert steps == [[], ["old"], ["old"]]
    core.incoming.write("r", 1, 0, kv[1, :NUM_AWAITED])
    steps = [[token.sequence_id for token in core.step().tokens] for _ in range(3)]
    assert steps == [["r"], ["old", "r"], ["old", "r"]]
    begin_loading(core, name="late")
    assert not core.sequences.by_id["late"].is_loading, "found by name meanwhile"


def test_only_awaited_blocks_are_taken_and_a_begun_sequence_begins_once(
    model: Model, kv: torch.Tensor
) -> None:
    core = engine(model)
    begin_loading(core)
    with pytest.raises(BadBlocks, match="takes 6 blocks"):
        core.incoming.write("r", 0, 6, kv[0, 6:7])
    with pytest.raises(WrongState):
        core.sequences.begin("r", num_computed_tokens=0)
    core.incoming.write("r", 0, 0, kv[0, :NUM_AWAITED])
    core.incoming.write("r", 0, 0, torch.full_like(kv[0, :NUM_AWAITED], 9.0))  # a second time: not taken
    core.step()
    core.incoming.write("r", 1, 0, kv[1, :NUM_AWAITED])
    assert ids(drain(core)["r"]) == alone(model, generation(prompt_of(30)))


@pytest.mark.parametrize("has_stepped", [False, True])
def test_what_had_come_whole_is_found_when_it_is_begun_anew(
    model: Model, kv: torch.Tensor, has_stepped: bool
) -> None:
    core = engine(model)
    begin_loading(core)
    core.incoming.write("r", 0, 0, kv[0, :NUM_AWAITED])
    if has_stepped:
        core.step()
    core.incoming.write("r", 1, 0, kv[1, :3])
    core.incoming.write("r", 1, 4, kv[1, 4:5])  # of no use without the one before
    core.sequences.abort("r")
    assert core.step().stored == block_names(prompt_of(30), SIZE, model.fingerprint, "")[:3]
    check_baseline(core)
    reservation = core.sequences.reserve(generation(prompt_of(30)), "r", whole_prompt=True)
    assert reservation is not None
    assert reservation.num_cached_blocks == 3
    core.sequences.begin("r", num_computed_tokens=3 * SIZE)
    told = drain(core)["r"]
    assert ids(told) == alone(model, generation(prompt_of(30)))
    assert told[0].num_cached_tokens == 3 * SIZE


def test_an_error_in_a_step_of_its_own_fails_it_alone(model: Model, kv: torch.Tensor) -> None:
    class Breaking(ReferenceAttention):
        def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
            if len(k) == 30 - NUM_AWAITED * SIZE:
                raise RuntimeError("no memory")
            super().write_kv(k, v, kv, slots)

    core = engine(model, attention=Breaking())
    begin(core, generation(prompt_of(9, 1), "other"))
    begin_loading(core)
    core.step()
    core.incoming.write("r", 0, 0, kv[0, :NUM_AWAITED])
    failed = [*core.step().failed, *core.step().failed]
    assert [(one.sequence_id, one.reason) for one in failed] == [("r", FailureReason.INTERNAL)]
    assert len(drain(core)["other"]) >= 9
    check_baseline(core)


def test_preempted_while_loading_it_is_computed_and_says_so(model: Model, kv: torch.Tensor) -> None:
    core = engine(model, num_blocks=12)
    begin(core, generation(prompt_of(9, 1), "old", max_tokens=30))
    core.step()
    begin_loading(core)
    core.incoming.write("r", 0, 0, kv[0, :NUM_AWAITED])
    told = drain(core)
    assert told["r"][0].num_cached_tokens == 0
    assert ids(told["r"]) == alone(model, generation(prompt_of(30)))
    assert ids(told["old"]) == alone(model, generation(prompt_of(9, 1), max_tokens=30))[1:]
    check_baseline(core)


def test_costs_are_learned_and_tell_how_long_the_queue_is(model: Model, kv: torch.Tensor) -> None:
    core = engine(model)
    assert (core.load().prefill_cost, core.load().queued_seconds) == (None, 0.0)
    begin(core, generation(prompt_of(20, 1), "first"))
    begin_loading(core)
    expected = prefill_seconds(DEFAULT_PREFILL_COST, 20, 0) + prefill_seconds(DEFAULT_PREFILL_COST, 6, 24)
    assert core.load().queued_seconds == pytest.approx(expected)
    core.step()
    learned = core.load().prefill_cost
    assert learned is not None
    assert core.load().queued_seconds == pytest.approx(prefill_seconds(learned, 6, 24))
    core.incoming.write("r", 0, 0, kv[0, :NUM_AWAITED])
    core.step()
    core.incoming.write("r", 1, 0, kv[1, :NUM_AWAITED])
    drain(core)
    assert core.load().prefill_cost != learned
    assert core.load().queued_seconds == 0.0


def test_smollm2_gives_the_same_tokens_whatever_order_its_kv_comes_in() -> None:
    path = find_model("smollm2-135m-instruct")
    model = load_model(path, dtype=torch.float32)
    text = "The mesh keeps what it has computed, so that nobody computes it twice. " * 5
    prompt = load_tokenizer(path).encode(text, add_special_tokens=False)
    sizes = {"block_size": 16, "max_num_batched_tokens": 256}
    cold = engine(model, **sizes)
    begin(cold, generation(prompt, max_tokens=8))
    expected = ids(drain(cold)["r"])
    num_awaited = len(prompt) * 3 // 4 // 16
    kv = cold.read_blocks(block_names(prompt, 16, model.fingerprint, ""))
    core = engine(model, **sizes)
    assert core.sequences.reserve(generation(prompt, max_tokens=8), "r", whole_prompt=True) is not None
    core.sequences.begin("r", num_computed_tokens=num_awaited * 16, awaits_kv=True)
    pieces = [(layer, block) for layer in range(model.config.num_layers) for block in range(num_awaited)]
    Random(5).shuffle(pieces)
    num_tokens = 0
    for layer, block in pieces:
        assert core.incoming.write("r", layer, block, kv[block : block + 1, layer])
        num_tokens += len(core.step().tokens)
    assert not num_tokens - 1, "the first token came with the last block"
    assert expected[1:] == ids(drain(core)["r"])
    check_baseline(core)


async def write(engine: Engine, name: str, layer: int, kv: torch.Tensor) -> bool:
    return await engine.write_blocks(name, layer, 0, kv[layer, :NUM_AWAITED])


async def begin_waiting(engine: Engine, kv: torch.Tensor, deadline: float = float("inf")) -> None:
    """In the middle of its step, waiting for its last layer."""
    asked = generation(prompt_of(30), deadline=deadline)
    assert await engine.reserve(asked, whole_prompt=True) is not None
    await engine.begin("r", num_computed_tokens=NUM_AWAITED * SIZE, awaits_kv=True, hand_over=True)
    assert await write(engine, "r", 0, kv)


async def test_an_abort_ends_the_wait_and_the_same_name_may_come_again(
    model: Model, kv: torch.Tensor
) -> None:
    listener = Listener()
    async with opened(model, listener) as engine:
        await begin_waiting(engine, kv)
        await listener.until(lambda: listener.layers)
        engine.abort("r")
        engine.release_layer(listener.layers.pop())
        assert await engine.reserve(generation(prompt_of(30)), whole_prompt=True) is not None
        assert not await write(engine, "nobody", 1, kv)
        await engine.begin("r", num_computed_tokens=0)
        assert not await write(engine, "r", 1, kv), "late writes of the first attempt are not taken"
        await listener.until(lambda: len(listener.ids("r")) == 12)
        assert listener.ids("r") == alone(model, generation(prompt_of(30)))
        assert engine.num_free_blocks == 120
    assert not listener.layers
    assert not listener.failed


async def test_the_deadline_ends_the_wait(model: Model, kv: torch.Tensor) -> None:
    listener, now = Listener(), 1000.0
    async with opened(model, listener, clock=lambda: now) as engine:
        await begin_waiting(engine, kv, deadline=1000.05)
        await listener.until(lambda: listener.layers)
        now = 1000.05
        await listener.until(lambda: listener.failed)
        assert listener.failed[0].reason is FailureReason.DEADLINE
        assert engine.num_free_blocks == 120
        assert not await write(engine, "r", 1, kv)


async def test_closing_ends_the_wait(model: Model, kv: torch.Tensor) -> None:
    listener = Listener()
    async with opened(model, listener) as engine:
        await begin_waiting(engine, kv)
    assert [failure.reason for failure in listener.failed] == [FailureReason.ABORTED]


async def test_a_write_does_not_queue_behind_what_waits_for_the_end_of_the_step(
    model: Model, kv: torch.Tensor
) -> None:
    class OneLayerAtATime(GatedAttention):
        def attend(
            self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float
        ) -> torch.Tensor:
            attended = super().attend(q, kv, batch, scale)
            self.gate.clear()
            return attended

    listener, attention = Listener(), OneLayerAtATime()
    async with opened(model, listener, attention=attention) as engine:
        assert await engine.reserve(generation(prompt_of(30), "held"), whole_prompt=True) is not None
        asked = generation(prompt_of(9, 1), "runs", max_tokens=1)
        await reserve_and_begin(engine, asked)
        await asyncio.to_thread(attention.arrived.wait)
        reserving = asyncio.ensure_future(
            engine.reserve(generation(prompt_of(9, 2), "late"), whole_prompt=True)
        )
        writing = asyncio.ensure_future(write(engine, "held", 0, kv))
        await asyncio.sleep(0)  # both are on their way, the write behind
        attention.gate.set()
        assert await writing
        assert not reserving.done()
        attention.gate.set()
        assert await reserving


async def test_names_are_told_as_they_come_and_go(model: Model) -> None:
    listener = Listener()
    async with opened(model, listener) as engine:
        for kind in range(12):
            await reserve_and_begin(engine, generation(prompt_of(50, kind), f"r{kind}", max_tokens=2))
        await listener.until(lambda: len(listener.ids("r11")) == 2)
        held = set(await engine.held_names())
        await asyncio.sleep(0)
        assert listener.held_names == held
        assert len(held) < 12 * 12, "some were evicted"
        assert set(block_names(prompt_of(50, 11), SIZE, model.fingerprint, "")) <= held


async def test_a_cost_can_be_asked_for_at_any_time(model: Model) -> None:
    listener = Listener()
    unstarted = Engine(model, EngineSettings(max_model_len=8, num_blocks=2))
    assert unstarted.prefill_cost() == DEFAULT_PREFILL_COST
    await unstarted.close()
    async with opened(model, listener) as engine:
        await reserve_and_begin(engine, generation(prompt_of(50), max_tokens=1))
        await listener.until(lambda: listener.steps)
        assert engine.prefill_cost() == engine.load().prefill_cost != DEFAULT_PREFILL_COST
