"""The small parts that moves are made of: what is left to copy, who hears of a step, what lies at home."""

import numpy as np
import pytest
import torch
from engine_moves import SIZE, Mesh, begin, core_of, drain, generation, model_of, prompt_of
from hypothesis import given
from hypothesis import strategies as st
from memory_host import MemoryHost

from libs.engine.errors import NotYet
from libs.engine.forward.remote_kv import Hosts, result_now
from libs.engine.hosting.calls import ANSWERED, BeginStep, HostedCall, MoveBlocks, Settle
from libs.engine.hosting.hosted_step import highest_block
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.hosting.split_context import split_context
from libs.engine.memory.pool import SlotRows
from libs.engine.meter import Meter
from libs.engine.migration import layout
from libs.engine.migration.kv_copy import DirtyBlocks, Staging
from libs.placement.module import heads_of, whole_layers
from libs.placement.placement import PlacedModule

BLOCKS = st.sets(st.integers(0, 9), max_size=6)


@given(BLOCKS, st.lists(st.one_of(BLOCKS, st.integers(0, 4)), max_size=12), BLOCKS)
def test_what_was_written_after_it_was_copied_is_copied_again(
    live: set[int], acts: list[set[int] | int], dead: set[int]
) -> None:
    dirty, stale, still_live = DirtyBlocks(live), set(live), set(range(10)) - dead
    for act in acts:
        if isinstance(act, int):
            taken = dirty.take(act, still_live)
            assert len(taken) == len(set(taken)) == min(act, len(stale & still_live))
            assert set(taken) <= stale & still_live
            stale -= set(taken)
        else:
            dirty.add(act)
            stale |= act
        assert dirty.num_left(still_live) == len(stale & still_live)


def test_blocks_written_last_are_copied_last() -> None:
    dirty = DirtyBlocks([1, 2, 3])
    dirty.add([1])
    assert dirty.take(2, {1, 2, 3}) == [2, 3]
    dirty.rename({1: 7})
    assert dirty.take(2, {7}) == [7]


@st.composite
def steps(draw: st.DrawFn) -> BeginStep:
    """Sequences with queries at their ends, in blocks drawn at random."""
    ids = draw(st.permutations(range(24)))
    tables, contexts, queries = [], [], []
    for number in range(draw(st.integers(1, 4))):
        context = draw(st.integers(1, 5 * SIZE))
        queries.append(draw(st.integers(1, context)))
        contexts.append(context)
        tables.append(ids[number * 6 : number * 6 + 5])
    positions = np.concatenate([np.arange(c - q, c) for c, q in zip(contexts, queries, strict=True)])
    rows = np.repeat(np.arange(len(queries)), queries)
    table = np.array(tables, dtype=np.int32)
    slots = table[rows, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return BeginStep(
        positions, slots, table, np.array(contexts, dtype=np.int32), starts, max(queries), max(contexts), None
    )


@given(steps(), st.integers(0, 24), st.integers(0, 24))
def test_each_query_sees_exactly_the_tokens_before_it_that_lie_in_these_blocks(
    step: BeginStep, first: int, num_blocks: int
) -> None:
    part = split_context(step, first, first + num_blocks, SIZE, torch.device("cpu"))
    rows = np.repeat(np.arange(len(step.context_lens)), np.diff(step.query_starts))
    expected = [
        [
            (int(block) - first) * SIZE + offset
            for block, start in zip(step.block_tables[row], range(0, 5 * SIZE, SIZE), strict=True)
            for offset in range(SIZE)
            if first <= block < first + num_blocks and start + offset <= position
        ]
        for row, position in zip(rows, step.positions, strict=True)
    ]
    seen = [
        [int(table[place // SIZE]) * SIZE + place % SIZE for place in range(context)]
        for table, context in zip(part.batch.block_tables, part.batch.context_lens.tolist(), strict=True)
    ]
    assert seen == expected
    slots = step.slots - first * SIZE
    here = (slots >= 0) & (slots < num_blocks * SIZE)
    assert part.tokens.tolist() == np.flatnonzero(here).tolist()
    assert part.slots.tolist() == slots[here].tolist()


@given(steps())
def test_the_highest_block_of_a_step_is_one_that_it_reads(step: BeginStep) -> None:
    used = [block for row in range(len(step.context_lens)) for block in _used(step, row)]
    assert highest_block(step, SIZE) == max(used)


def _used(step: BeginStep, row: int) -> list[int]:
    return step.block_tables[row, : -(-int(step.context_lens[row]) // SIZE)].tolist()  # type: ignore[no-any-return]


class Recorder:
    """A Host that answers what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.worker = "host"
        self.calls: list[HostedCall] = []
        self.answers: list[Answer] = []

    def call(self, call: HostedCall) -> Answer:
        self.calls.append(call)
        self.answers.append(Answer(lambda: None))
        if not isinstance(call, ANSWERED):
            self.answers[-1].give(torch.empty(0))
        return self.answers[-1]


def test_a_step_is_told_once_and_again_after_another_one() -> None:
    hosts, host = Hosts(result_now, Meter()), Recorder()
    hosts.add(host)
    long, short = np.zeros(0, np.int64), np.zeros(0, np.int32)
    some, other = (BeginStep(long, long, short, short, short, 0, 0, None) for _ in range(2))
    for step in (some, some, other, some, some):
        hosts.begin("host", step)
    assert host.calls == [some, other, some]
    hosts.call_all(MoveBlocks(np.empty((2, 0), dtype=np.int64)))
    assert len(host.calls) == 4
    hosts.keep([])
    with pytest.raises(HostLost, match="no Link"):
        hosts.ask("host", Settle())


def test_the_wait_for_a_host_is_measured() -> None:
    now = [0.0]

    def wait(worker: str, answer: Answer) -> torch.Tensor:
        now[0] += 0.25
        answer.give(torch.ones(1))
        return answer.result()

    meter, host = Meter(clock=lambda: now[0]), Recorder()
    hosts = Hosts(wait, meter)
    hosts.add(host)
    now[0] = 5.0
    assert hosts.ask("host", Settle()).tolist() == [1.0]
    assert meter.rates()[0] == pytest.approx(0.25)


def test_a_piece_on_its_way_home_is_waited_for_without_standing_still() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    begin(mesh.home, generation(prompt_of(50), "x"))
    mesh.home.step()
    placed = mesh.place(whole_layers(0, 2), "m")
    asked: list[tuple[str, HostedCall, Answer]] = []
    late = False
    hosted = mesh.hosts["host"].hosted

    def ask(guest: str, call: HostedCall, answer: Answer) -> None:
        asked.append((guest, call, answer))
        if not late:
            run()

    def run() -> None:
        for guest, call, answer in asked:
            hosted.put(guest, call, answer)
        asked.clear()
        hosted.run_all()

    host = MemoryHost("host", "home", ask, lambda: None)
    mesh.home.migrator.begin(placed, host, None)
    mesh.switch("m")
    num_blocks = mesh.begin_return("m")
    late = True
    with pytest.raises(NotYet):
        mesh.home.migrator.copy_some("m", 1 << 30)
    with pytest.raises(NotYet):
        mesh.home.migrator.copy_some("m", 1 << 30)
    late = False
    run()
    progress = mesh.home.migrator.copy_some("m", 1 << 30)
    assert progress.num_left_blocks == 0
    assert progress.num_copied_bytes == num_blocks * mesh.home.pool.layout.block_bytes
    mesh.switch("m")
    plain = core_of(model_of("gqa"))
    begin(plain, generation(prompt_of(50), "x"))
    plain.step()
    assert drain(mesh.home).tokens == drain(plain).tokens


def test_of_blocks_that_nobody_holds_the_last_used_few_outlive_a_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=60))
    for kind in range(4):
        begin(mesh.home, generation(prompt_of(60, kind), f"s{kind}", max_tokens=2))
        drain(mesh.home)
    names = mesh.home.sequences.allocator.names()
    assert len(names) == 4 * 7
    monkeypatch.setattr(layout, "_CACHED_BYTES", 10 * mesh.home.pool.layout.block_bytes)
    assert mesh.begin(heads_of(0, 4, (1,)), "m") == 10
    mesh.switch("m")
    kept = mesh.home.sequences.allocator.names()
    assert len(kept) == 10
    assert set(kept) >= set(names[-7:])
    step = mesh.home.step()
    assert sorted(step.removed) == sorted(set(names) - set(kept))


def test_staged_blocks_go_where_their_blocks_are_by_then() -> None:
    pool = torch.zeros((6, 3, 2, SIZE, 4))
    staging = Staging()
    staging.put([1, 5], torch.full((2, 2, 2, SIZE, 4), 1.0))
    staging.put([5], torch.full((1, 2, 2, SIZE, 4), 2.0))
    staging.rename({5: 0})
    staging.fill(pool, [0, 2], live={0, 3})
    assert pool[0, :, 0, 0, 0].tolist() == [2.0, 0.0, 2.0]
    assert pool[1:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_copied_and_cleared_in_place(dtype: torch.dtype) -> None:
    memory = torch.arange(4 * 3 * 2 * SIZE * 2).to(dtype).view(4, 3, 2, SIZE, 2)
    before, rows = memory.clone(), SlotRows(memory)
    rows.copy(0, np.array([0, 2]), rows, 0, np.array([2, 1]))
    assert torch.equal(memory[0], before[0][[2, 1, 1]])
    rows.clear(3, np.array([1]))
    assert not memory[3, 1].any()
    assert torch.equal(memory[3, [0, 2]], before[3, [0, 2]])


def test_a_move_is_named_by_its_own_id() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    mesh.begin(heads_of(0, 4, (1,)), "m")
    mesh.home.migrator.cancel("other")
    assert mesh.home.migrator.is_under_way
    assert (
        mesh.home.migrator.layout.capacity_with(
            PlacedModule(move_id="n", module=whole_layers(0, 2), worker="host")
        )
        == 2 * 120
    )
