"""KV that comes in any order and at any time, with aborts, deadlines and preemptions in between."""

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import torch
from engine_harness import (
    BLOCK_BYTES,
    CONFIG,
    SIZE,
    alone,
    check_baseline,
    check_books,
    engine,
    kv_of,
    prompt_of,
)
from engine_harness import generation as asking
from hypothesis import given
from hypothesis import strategies as st
from random_model import random_model

from libs.engine.outputs import LayerOutput, TokenOutput
from libs.kv.names import block_names
from libs.model.model import Model
from libs.request.outcome import FailureReason

NUM_LAYERS = 4
MAX_TOKENS = 20
KINDS = 5
LONGEST = 28
GARBAGE = 7.0
"""What blocks hold before they are written: it would change every token."""


@cache
def model() -> Model:
    torch.set_num_threads(1)
    return random_model(replace(CONFIG, num_layers=NUM_LAYERS), seed=6, dtype=torch.float32)


@cache
def expected(length: int, kind: int) -> list[int]:
    return alone(model(), asking(prompt_of(length, kind), max_tokens=MAX_TOKENS))


@cache
def true_kv(length: int, kind: int) -> torch.Tensor:
    return kv_of(model(), prompt_of(length, kind))


@cache
def true_names(kind: int) -> list[bytes]:
    return block_names(prompt_of(LONGEST, kind), SIZE, model().fingerprint, "")


@dataclass
class Request:
    """What a test knows of one request; `unwritten` are (layer, first block, end block)."""

    name: str
    length: int
    kind: int
    hand_over: bool
    deadline: float
    unwritten: list[tuple[int, int, int]] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    left: set[tuple[int, int]] = field(default_factory=set)
    """Layer and block of what was handed over."""
    is_over: bool = False


class World:
    """One engine whose prompts await KV, some of it in vain, and a hand that does everything to them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.core = engine(
            model(),
            num_blocks=random.choice((12, 14, 30)),
            max_model_len=48,
            max_num_seqs=3,
            max_num_batched_tokens=random.choice((4, 10, 40)),
            hand_over_bytes=random.choice((1, 4, 40)) * BLOCK_BYTES * NUM_LAYERS // CONFIG.num_layers,
            clock=lambda: self.now,
            on_layers=self.on_layers,
        )
        self.core.pool.blocks.fill_(GARBAGE)
        self.requests: dict[str, Request] = {}
        self.outputs: list[LayerOutput] = []
        self.held_names: set[bytes] = set()
        self.num_arrived = 0

    def live(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_over]

    def run(self, num_events: int) -> None:
        """Events in any order; the rest ends by its deadline or by itself, and nothing is held."""
        events = (self.step, self.write, self.arrive, self.release, self.abort, self.time_passes)
        for _ in range(num_events):
            self.random.choices(events, weights=(10, 8, 2, 4, 0.4, 0.2))[0]()
            self.check()
        for _ in range(2000):
            if not self.live():
                break
            if self.step() and self.live() and not self.outputs:
                assert any(one.is_loading for one in self.core.sequences.by_age), "waits for nothing"
                self.now = min(request.deadline for request in self.live())
            self.release()
            self.check()
        assert not self.live(), "somebody waits for ever"
        while self.outputs:
            self.release()
        check_baseline(self.core)
        assert self.core.step().is_idle

    def check(self) -> None:
        check_books(self.core)
        assert set(self.core.sequences.by_id) == {request.name for request in self.live()}
        for kind in range(KINDS):
            found = self.core.read_blocks(true_names(kind)).transpose(0, 1)
            whole = true_kv(LONGEST, kind)[:, : found.shape[1]]
            assert torch.allclose(found, whole, atol=1e-4), "what can be found is whole"

    def arrive(self) -> None:
        request = Request(
            f"r{self.num_arrived}",
            self.random.randint(1, LONGEST // 2) * self.random.choice((1, 2)),
            self.random.randrange(KINDS),
            hand_over=self.random.random() < 0.5,
            deadline=self.now + self.random.choice((5.0, 1000.0)),
        )
        if self.reserve_and_begin(request, request.length // SIZE - self.random.choice((0, 0, 1, 3))):
            self.num_arrived += 1
            self.requests[request.name] = request

    def reserve_and_begin(self, request: Request, num_awaited: int) -> bool:
        prompt = prompt_of(request.length, request.kind)
        asked = asking(prompt, request.name, deadline=request.deadline, max_tokens=MAX_TOKENS)
        is_whole = self.random.random() < 0.5
        held = self.core.sequences.reserve(asked, request.name, whole_prompt=is_whole)
        if held is None:
            return False
        num_awaited = max(0, min(num_awaited, held.num_blocks))
        for layer in range(NUM_LAYERS):
            first = self.random.randint(0, held.num_cached_blocks)  # some of what is there comes again
            while first < num_awaited:
                end = self.random.randint(first + 1, num_awaited)
                request.unwritten.append((layer, first, end))
                first = end
        if self.random.random() < 0.5:
            request.unwritten.sort()
        else:
            self.random.shuffle(request.unwritten)
        for _ in range(self.random.randint(0, len(request.unwritten)) // 3):
            assert self.write_next(request)
        self.core.sequences.begin(
            request.name, num_computed_tokens=num_awaited * SIZE, hand_over=request.hand_over, awaits_kv=True
        )
        return True

    def write_next(self, request: Request) -> bool:
        layer, first, end = request.unwritten.pop(0)
        kv = true_kv(request.length, request.kind)
        return self.core.incoming.write(request.name, layer, first, kv[layer, first:end])

    def write(self) -> None:
        loading = [request for request in self.live() if request.unwritten]
        if loading:
            request = self.random.choice(loading)
            for _ in range(min(self.random.randint(1, 4), len(request.unwritten))):
                is_awaited = self.core.sequences.by_id[request.name].is_loading
                assert self.write_next(request) == is_awaited

    def abort(self) -> None:
        """Also as a client does that falls back to computing: the same name comes again at once."""
        if not self.live():
            return
        request = self.random.choice(self.live())
        self.core.sequences.abort(request.name)
        assert not self.core.incoming.write(request.name, 0, 0, true_kv(4, 0)[0, :1])
        self.outputs = [output for output in self.outputs if not self.is_of(output, request)]
        request.unwritten = []
        request.is_over = True
        again = replace(request, is_over=False, tokens=[], left=set())
        if self.random.random() < 0.7 and self.reserve_and_begin(again, 0):
            self.requests[request.name] = again

    def is_of(self, output: LayerOutput, request: Request) -> bool:
        if output.sequence_id != request.name:
            return False
        self.core.budget.release(output)
        return True

    def time_passes(self) -> None:
        self.now += self.random.choice((0.5, 2.0))

    def release(self) -> None:
        if self.outputs:
            self.core.budget.release(self.outputs.pop(self.random.randrange(len(self.outputs))))

    def on_layers(self, outputs: list[LayerOutput]) -> None:
        self.outputs += outputs
        for output in outputs:
            request = self.requests[output.sequence_id]
            for index, block in enumerate(output.blocks, output.first_block):
                assert (output.layer, index) not in request.left, "a block leaves once per layer"
                request.left.add((output.layer, index))
                num_filled = min(SIZE, request.length - index * SIZE)
                true = true_kv(request.length, request.kind)[output.layer, index]
                assert torch.allclose(block[:, :, :num_filled], true[:, :, :num_filled], atol=1e-4)

    def step(self) -> bool:
        """True when there was nothing to do."""
        step = self.core.step()
        for token in (*step.tokens, *step.prompts_done):
            self.take(self.requests[token.sequence_id], token)
        for failure in step.failed:
            request = self.requests[failure.sequence_id]
            assert failure.reason is FailureReason.DEADLINE, failure.detail
            assert not request.is_over
            assert request.deadline <= self.now
            request.is_over = True
        assert not self.held_names.intersection(step.stored)
        assert self.held_names.issuperset(step.removed)
        self.held_names = (self.held_names | set(step.stored)) - set(step.removed)
        assert self.held_names == set(self.core.sequences.allocator.names())
        return step.is_idle

    def take(self, request: Request, token: TokenOutput) -> None:
        assert not request.is_over, "nothing comes after the end"
        request.tokens.append(token)
        ids = [one.token_id for one in request.tokens]
        whole = expected(request.length, request.kind)
        assert ids == whole[: len(ids)]
        request.is_over = request.hand_over or token.finish is not None
        if request.hand_over:
            num_blocks = -(-request.length // SIZE)
            assert request.left == {(layer, b) for layer in range(NUM_LAYERS) for b in range(num_blocks)}
        elif request.is_over:
            assert len(ids) == len(whole)


@given(seed=st.integers(0, 2**32))
def test_tokens_are_right_and_nothing_is_held_in_the_end(seed: int) -> None:
    World(Random(seed)).run(200)
