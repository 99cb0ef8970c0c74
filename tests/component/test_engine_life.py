"""The engine on an event loop: its thread, its listener, its end."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch
from engine_harness import (
    BLOCK_SHAPE,
    SIZE,
    WAIT_SECONDS,
    GatedAttention,
    Listener,
    opened,
    prompt_of,
    tiny_model,
)
from engine_harness import generation as asking
from engine_harness import reserve_and_begin as begin

from kernels.paged_attention.reference import ReferenceAttention
from libs.engine.engine import Engine, EngineSettings, TokenOutput
from libs.engine.errors import EngineClosed, EngineDied, PromptTooLong, UnknownSequence
from libs.engine.scheduling.sequence_table import SequenceTable
from libs.kv.names import block_names
from libs.model.model import Model
from libs.request.generation import Generation
from libs.request.outcome import FailureReason


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def generation(name: str, length: int = 10, max_tokens: int = 8, **more: float) -> Generation:
    return asking(prompt_of(length), name, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


async def test_tokens_come_on_the_loop_one_call_per_step_until_the_end(model: Model) -> None:
    listener = Listener()
    async with opened(model, listener) as engine:
        assert engine.num_total_blocks == engine.num_free_blocks == 120
        await asyncio.gather(*(begin(engine, generation(f"r{number}", 10 + number)) for number in range(3)))
        await listener.until(lambda: sum(map(len, listener.steps)) == 24)
        assert engine.num_free_blocks == 120
    assert listener.threads == {threading.get_ident()}
    for number in range(3):
        assert len(listener.ids(f"r{number}")) == 8
    assert all(len({token.sequence_id for token in step}) == len(step) for step in listener.steps)
    assert not listener.failed


async def test_a_prompt_handed_to_another_engine_gives_the_same_tokens(model: Model) -> None:
    alone, here, there = Listener(), Listener(), Listener()
    asked = generation("r", 30)
    async with opened(model, alone) as engine:
        await begin(engine, asked)
        await alone.until(lambda: len(alone.ids("r")) == 8)
    async with opened(model, here) as prefill, opened(model, there) as decode:
        held = await decode.reserve(asked, whole_prompt=True)
        assert held is not None
        assert (held.num_blocks, held.num_cached_blocks) == (8, 0)
        await begin(prefill, asked, hand_over=True)
        await here.until(lambda: here.prompts)
        for output in here.layers:
            sent = torch.from_numpy(output.blocks.view(torch.uint8).numpy().copy()).view(torch.float32)
            assert await decode.write_blocks("r", output.layer, output.first_block, sent)
            prefill.release_layer(output)
            prefill.release_layer(output)
        assert prefill.num_free_blocks == 120
        await decode.start_decode("r", here.prompts[0])
        await there.until(lambda: len(there.ids("r")) == 7)
        assert [here.prompts[0].token_id, *there.ids("r")] == alone.ids("r")
        assert decode.num_free_blocks == 120
        names = block_names(list(range(3)), SIZE, model.fingerprint, "")
        assert (await decode.read_blocks(names)).shape == (0, 2, *BLOCK_SHAPE)


async def test_an_aborted_sequence_is_not_heard_of_again(model: Model) -> None:
    listener, attention = Listener(), GatedAttention()
    async with opened(model, listener, attention=attention) as engine:
        await begin(engine, generation("gone"))
        await asyncio.to_thread(attention.arrived.wait)
        left = asyncio.ensure_future(begin(engine, generation("left", max_tokens=1), hand_over=True))
        engine.abort("gone")
        engine.abort("gone")
        engine.abort("nobody")
        attention.gate.set()
        await left
        await listener.until(lambda: listener.prompts)
        with pytest.raises(UnknownSequence):
            await engine.begin("gone", num_computed_tokens=0)
        assert engine.num_free_blocks == 120
        assert engine.load().num_running == 0
    assert not listener.ids("gone")
    assert not listener.failed


async def test_layers_of_an_aborted_hand_over_are_released_by_the_engine(model: Model) -> None:
    listener, attention = Listener(), GatedAttention()
    # A block at a time: a second one would wait for ever for the first.
    async with opened(model, listener, attention=attention, hand_over_bytes=1) as engine:
        await begin(engine, generation("gone", 30), hand_over=True)
        attention.arrived.wait()  # on the loop: a layer was posted and cannot be heard before the abort
        engine.abort("gone")
        attention.gate.set()
        await begin(engine, generation("next", 3), hand_over=True)
        await listener.until(lambda: listener.layers)
        assert {output.sequence_id for output in listener.layers} == {"next"}


async def test_kv_is_written_while_a_step_runs(model: Model) -> None:
    listener, attention = Listener(), GatedAttention()
    async with opened(model, listener, attention=attention) as engine:
        assert await engine.reserve(generation("held"), whole_prompt=True) is not None
        await begin(engine, generation("runs", max_tokens=1))
        await asyncio.to_thread(attention.arrived.wait)
        blocks = torch.ones(3, *BLOCK_SHAPE)
        written = asyncio.ensure_future(engine.write_blocks("held", 1, 0, blocks))
        late = asyncio.ensure_future(engine.write_blocks("nobody", 1, 0, blocks))
        await asyncio.sleep(0)
        attention.gate.set()
        assert await written
        assert not await late
        await listener.until(lambda: listener.ids("runs"))


async def test_closing_fails_what_is_left_and_joins_the_thread(model: Model) -> None:
    listener, attention = Listener(), GatedAttention()
    async with opened(model, listener, attention=attention) as engine:
        assert await engine.reserve(generation("held"), whole_prompt=True) is not None
        await begin(engine, generation("runs"))
        await asyncio.to_thread(attention.arrived.wait)
        watching = asyncio.ensure_future(engine.watch())
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        attention.gate.set()
        await closing
        await watching
    assert {(one.sequence_id, one.reason) for one in listener.failed} == {
        ("runs", FailureReason.ABORTED),
        ("held", FailureReason.ABORTED),
    }
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]
    with pytest.raises(EngineClosed):
        await engine.reserve(generation("late"), whole_prompt=True)
    engine.abort("runs")
    await engine.close()


async def test_commands_that_wait_when_the_engine_closes_are_refused(model: Model) -> None:
    listener, attention = Listener(), GatedAttention()
    async with opened(model, listener, attention=attention) as engine:
        await begin(engine, generation("runs"))
        await asyncio.to_thread(attention.arrived.wait)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed):
            await engine.reserve(generation("late"), whole_prompt=True)
        attention.gate.set()
        await closing
    assert [failure.reason for failure in listener.failed] == [FailureReason.ABORTED]


async def test_a_reservation_nobody_waits_for_any_more_is_given_back(model: Model) -> None:
    listener, attention = Listener(), GatedAttention()
    async with opened(model, listener, attention=attention) as engine:
        await begin(engine, generation("runs", max_tokens=1))
        await asyncio.to_thread(attention.arrived.wait)
        reserving = asyncio.ensure_future(engine.reserve(generation("r"), whole_prompt=True))
        await asyncio.sleep(0)
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        attention.gate.set()
        await listener.until(lambda: listener.ids("runs"))
        with pytest.raises(UnknownSequence):
            await engine.begin("r", num_computed_tokens=0)
        assert engine.num_free_blocks == 120


async def test_a_step_that_breaks_fails_its_sequences_and_the_engine_lives_on(model: Model) -> None:
    class Breaking(ReferenceAttention):
        is_broken = True

        def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
            if self.is_broken:
                raise RuntimeError("no memory")
            super().write_kv(k, v, kv, slots)

    listener, attention = Listener(), Breaking()
    async with opened(model, listener, attention=attention) as engine:
        await begin(engine, generation("a"))
        await listener.until(lambda: listener.failed)
        assert listener.failed[0].reason is FailureReason.INTERNAL
        attention.is_broken = False
        await begin(engine, generation("b"))
        await listener.until(lambda: len(listener.ids("b")) == 8)
        assert engine.num_free_blocks == 120


async def test_a_thread_that_dies_fails_everything_and_says_so(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, attention = Listener(), GatedAttention()
    async with opened(model, listener, attention=attention) as engine:
        assert await engine.reserve(generation("b"), whole_prompt=True) is not None
        await begin(engine, generation("a"))
        await asyncio.to_thread(attention.arrived.wait)
        watching = asyncio.ensure_future(engine.watch())

        def broken(sequences: SequenceTable, now: float) -> None:
            raise RuntimeError("cannot go on")

        monkeypatch.setattr(SequenceTable, "expire", broken)
        attention.gate.set()
        with pytest.raises(EngineDied, match="cannot go on"):
            async with asyncio.timeout(WAIT_SECONDS):
                await watching
        assert {(one.sequence_id, one.reason) for one in listener.failed} == {
            ("a", FailureReason.INTERNAL),
            ("b", FailureReason.INTERNAL),
        }
        with pytest.raises(EngineDied):
            await engine.reserve(generation("c"), whole_prompt=True)


async def test_a_listener_that_raises_does_not_stop_the_engine(model: Model) -> None:
    class Clumsy(Listener):
        def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
            super().on_tokens(tokens)
            raise KeyError("oops")

    listener, raised = Clumsy(), list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with opened(model, listener) as engine:
        await begin(engine, generation("r"))
        await listener.until(lambda: len(listener.ids("r")) == 8)
    assert [str(context["exception"]) for context in raised] == ["'oops'"] * 8


async def test_a_start_that_fails_raises_and_can_be_closed(model: Model) -> None:
    sizes = EngineSettings(max_model_len=8, kv_memory_bytes=10)
    engine = Engine(model, sizes)
    with pytest.raises(ValueError, match="below one block"):
        await engine.start(Listener())
    await engine.close()
    unstarted = Engine(model, sizes)
    assert (unstarted.num_total_blocks, unstarted.load().num_blocks) == (0, 0)
    await unstarted.close()


async def test_refusals_reach_the_caller_and_a_deadline_wakes_an_idle_engine(model: Model) -> None:
    listener, now = Listener(), 1000.0
    async with opened(model, listener, clock=lambda: now) as engine:
        with pytest.raises(PromptTooLong):
            await engine.reserve(generation("long", 400), whole_prompt=True)
        assert await engine.reserve(generation("held", deadline=1000.02), whole_prompt=True) is not None
        now = 1000.02
        await listener.until(lambda: listener.failed)
        assert listener.failed[0].reason is FailureReason.DEADLINE
        assert engine.num_free_blocks == 120
