"""A prefill and a decode engine, and all operations in any order: nothing leaks, every token is right."""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from engine_harness import (
    BLOCK_BYTES,
    BLOCK_SHAPE,
    alone,
    check_baseline,
    check_books,
    engine,
    prompt_of,
    tiny_model,
)
from engine_harness import generation as asking
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.engine.errors import UnknownSequence, WrongState
from libs.engine.outputs import LayerOutput, StepOutput, TokenOutput
from libs.request.generation import Generation

SIZES = {
    "max_model_len": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 10,
    "hand_over_bytes": 3 * BLOCK_BYTES,
}


def generation(name: str, length: int, kind: int, temperature: float, max_tokens: int) -> Generation:
    return asking(
        prompt_of(length, kind),
        name,
        max_tokens=max_tokens,
        temperature=temperature,
        frequency_penalty=temperature / 2,
        ignore_eos=False,
    )


@cache
def expected(length: int, kind: int, temperature: float, max_tokens: int) -> list[int]:
    return alone(tiny_model(), generation("r", length, kind, temperature, max_tokens))


@dataclass
class Request:
    """What a test knows of one request on its way."""

    name: str
    shape: tuple[int, int, float, int]
    generation: Generation
    tokens: list[TokenOutput] = field(default_factory=list)
    is_local: bool = False
    is_begun: bool = False
    num_unwritten: int = 0
    first: TokenOutput | None = None
    is_over: bool = False


class EnginesMachine(RuleBasedStateMachine):
    """`prefill` hands over to `decode`, which also takes prompts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[LayerOutput] = []
        self.prefill = engine(tiny_model(), num_blocks=12, on_layers=self.outputs.extend, **SIZES)
        self.decode = engine(tiny_model(), num_blocks=14, **SIZES)
        self.requests: dict[str, Request] = {}
        self.num_arrived = 0

    def live(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_over]

    @rule(
        length=st.integers(1, 20),
        kind=st.integers(0, 1),
        temperature=st.sampled_from([0.0, 0.8]),
        max_tokens=st.integers(1, 16),
        is_local=st.booleans(),
    )
    def arrive(self, length: int, kind: int, temperature: float, max_tokens: int, is_local: bool) -> None:
        name = f"r{self.num_arrived}"
        self.num_arrived += 1
        asked = generation(name, length, kind, temperature, max_tokens)
        free = self.decode.sequences.allocator.num_free
        if self.decode.sequences.reserve(asked, name, whole_prompt=True) is None:
            assert self.decode.sequences.allocator.num_free == free
            return
        if not is_local and self.prefill.sequences.reserve(asked, name, whole_prompt=False) is None:
            self.decode.sequences.abort(name)
            return
        shape = (length, kind, temperature, max_tokens)
        self.requests[name] = Request(name, shape, asked, is_local=is_local)

    @precondition(lambda self: any(not request.is_begun for request in self.live()))
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([one for one in self.live() if not one.is_begun]))
        request.is_begun = True
        if request.is_local:
            self.decode.sequences.begin(request.name, num_computed_tokens=0)
        else:
            self.prefill.sequences.begin(request.name, num_computed_tokens=0, hand_over=True)

    @rule()
    def step_prefill(self) -> None:
        step = self.prefill.step()
        assert not step.failed
        assert not step.tokens
        for first in step.prompts_done:
            self.requests[first.sequence_id].first = first

    @rule()
    def step_decode(self) -> None:
        self.take(self.decode.step())

    def take(self, step: StepOutput) -> None:
        assert not step.failed
        assert not step.prompts_done
        for token in step.tokens:
            request = self.requests[token.sequence_id]
            assert not request.is_over, "nothing comes after the end"
            request.tokens.append(token)
            self.check_end(request)

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        output = self.outputs.pop(data.draw(st.integers(0, len(self.outputs) - 1)))
        is_wanted = not self.requests[output.sequence_id].is_over
        assert (
            self.decode.incoming.write(output.sequence_id, output.layer, output.first_block, output.blocks)
            == is_wanted
        )
        self.prefill.budget.release(output)

    def adoptable(self) -> list[Request]:
        unwritten = {output.sequence_id for output in self.outputs}
        return [one for one in self.live() if one.first and not one.tokens and one.name not in unwritten]

    @precondition(lambda self: self.adoptable())
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.adoptable()))
        assert request.first is not None
        assert self.decode.sequences.start_decode(request.name, request.first) is None
        request.tokens.append(request.first)
        self.check_end(request)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live()))
        request.is_over = True
        self.prefill.sequences.abort(request.name)
        self.decode.sequences.abort(request.name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), act=st.sampled_from(["begin", "adopt", "write"]))
    def what_does_not_fit_is_refused_and_changes_nothing(self, data: st.DataObject, act: str) -> None:
        request = data.draw(st.sampled_from(list(self.requests.values())))
        if not request.is_over and not (request.is_local and request.is_begun) and not request.tokens:
            return
        used = self.decode.sequences.allocator.num_used
        if act == "write":
            assert not self.decode.incoming.write(request.name, 0, 0, torch.zeros(1, *BLOCK_SHAPE))
        else:
            with pytest.raises(UnknownSequence if request.is_over else WrongState):
                self.ask(act, request)
        assert self.decode.sequences.allocator.num_used == used

    def ask(self, act: str, request: Request) -> None:
        if act == "begin":
            self.decode.sequences.begin(request.name, num_computed_tokens=0)
        else:
            self.decode.sequences.start_decode(
                request.name, TokenOutput(request.name, len(request.tokens), 1)
            )

    def check_end(self, request: Request) -> None:
        ids = [token.token_id for token in request.tokens]
        assert [token.index for token in request.tokens] == list(range(len(ids)))
        whole = expected(*request.shape)
        assert ids == whole[: len(ids)]
        request.is_over = request.tokens[-1].finish is not None
        assert request.is_over == (len(ids) == len(whole))

    @invariant()
    def blocks_in_use_are_those_of_live_sequences(self) -> None:
        for core in (self.prefill, self.decode):
            check_books(core)
        assert set(self.decode.sequences.by_id) == {request.name for request in self.live()}
        assert sum(output.blocks.nbytes for output in self.outputs) == self.prefill.budget.out_bytes

    def teardown(self) -> None:
        """All that still lives is brought to its end; then both pools are as they were."""
        for request in self.live():
            if not request.is_begun:
                request.is_begun = True
                core = self.decode if request.is_local else self.prefill
                core.sequences.begin(request.name, num_computed_tokens=0, hand_over=not request.is_local)
        for _ in range(3000):
            if not self.live():
                break
            self.step_prefill()
            while self.outputs:
                output = self.outputs.pop()
                self.decode.incoming.write(
                    output.sequence_id, output.layer, output.first_block, output.blocks
                )
                self.prefill.budget.release(output)
            for request in self.adoptable():
                assert request.first is not None
                self.decode.sequences.start_decode(request.name, request.first)
                request.tokens.append(request.first)
                self.check_end(request)
            self.step_decode()
        assert not self.live(), "somebody waits for ever"
        while self.outputs:
            self.prefill.budget.release(self.outputs.pop())
        for core in (self.prefill, self.decode):
            check_baseline(core)


TestEngines = EnginesMachine.TestCase
TestEngines.settings = settings(suppress_health_check=[HealthCheck.too_slow])
