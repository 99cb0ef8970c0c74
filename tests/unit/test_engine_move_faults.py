"""Moves and what comes between: other moves, lost hosts, ids that change while KV is on its way."""

import pytest
import torch
from engine_moves import (
    SIZE,
    Mesh,
    Told,
    begin,
    check_baseline,
    core_of,
    drain,
    generation,
    model_of,
    prompt_of,
)

from libs.engine.errors import MoveRefused, NotYet
from libs.engine.forward.remote_kv import Hosts, result_now
from libs.engine.hosting.calls import ANSWERED, HostedCall
from libs.engine.hosting.port import Answer
from libs.engine.memory.pool import BlockLayout, Pool
from libs.engine.meter import Meter
from libs.engine.migration.kv_copy import InboundCopy
from libs.placement.module import heads_of, whole_layers
from libs.placement.placement import PlacedModule

SLOTS = ((0, 0), (1, 0))


class Slow:
    """A host that answers later, with what its blocks held when it was asked."""

    def __init__(self) -> None:
        self.worker = "host"
        self.blocks = torch.arange(12.0)[:, None, None, None, None].expand(12, 1, 2, SIZE, 4)
        self.unanswered: list[tuple[HostedCall, Answer]] = []

    def call(self, call: HostedCall) -> Answer:
        answer = Answer(lambda: None)
        if isinstance(call, ANSWERED):
            self.unanswered.append((call, answer))
        else:
            answer.give(torch.empty(0))
        return answer

    def answer(self) -> None:
        call, answer = self.unanswered.pop(0)
        answer.give(self.blocks[call.blocks])  # type: ignore[union-attr]  # copies home only read


def coming_home(live: list[int]) -> tuple[Pool, Slow, InboundCopy]:
    """Layer 1 of a model of two layers comes home to a pool that has it already, so that it can be read."""
    pool = Pool(BlockLayout(SLOTS, SIZE, 4, torch.float32), 12, torch.device("cpu"))
    host, hosts = Slow(), Hosts(result_now, Meter())
    hosts.add(host)
    placed = PlacedModule(move_id="m", module=whole_layers(1, 2), worker="host", num_blocks=12)
    return pool, host, InboundCopy(pool, hosts, placed, live, 1)


@pytest.mark.parametrize("asked", [[5, 9], [9, 5]])
def test_kv_on_its_way_home_does_not_land_in_a_block_that_took_its_id(asked: list[int]) -> None:
    pool, host, copy = coming_home(asked)
    with pytest.raises(NotYet):
        copy.copy_some(1 << 20, set(asked))
    copy.rename({9: 5})  # what was in 5 is over
    host.answer()
    assert copy.copy_some(1 << 20, {5}) > 0
    copy.fill({5})
    assert torch.equal(pool.blocks[5, 1], torch.full((2, SIZE, 4), 9.0))


def test_the_next_piece_is_asked_for_while_one_is_on_its_way() -> None:
    pool, host, copy = coming_home(list(range(6)))
    live = set(range(6))
    with pytest.raises(NotYet):
        copy.copy_some(2 * 2 * SIZE * 4 * 4, live)
    assert len(host.unanswered) == 2
    assert copy.num_left(live) == 6
    copy.wrote([0])  # asked again, behind what is on its way
    num_pieces = 0
    while copy.num_left(live):
        host.answer()
        num_pieces += copy.copy_some(2 * 2 * SIZE * 4 * 4, live) > 0
    assert num_pieces == 4
    assert copy.num_bytes == 7 * 2 * SIZE * 4 * 4
    copy.fill(live)
    assert pool.blocks[:6, 1, 0, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_weights_that_a_lost_host_had_are_not_forgotten_by_a_return_under_way() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    begin(mesh.home, generation(prompt_of(40), "x"))
    mesh.away(whole_layers(0, 1), "a", "a", with_weights=True)
    mesh.away(whole_layers(2, 4), "b", "b", with_weights=True)
    told = Told()
    told.add(mesh.home.step())
    mesh.begin_return("b")
    mesh.home.migrator.lose_host("a", "gone")
    mesh.switch("b")
    assert list(mesh.home.model.weights.layers) == [0, 1, 2, 3]
    plain = core_of(model_of("gqa"))
    begin(plain, generation(prompt_of(40), "x"))
    assert drain(mesh.home, told=told).tokens == drain(plain).tokens
    assert told.failed == {}
    check_baseline(mesh.home)


def test_a_move_goes_on_when_another_host_is_lost() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    begin(mesh.home, generation(prompt_of(40), "x"))
    mesh.away(whole_layers(0, 1), "a", "a", with_weights=True)
    told = Told()
    told.add(mesh.home.step())
    mesh.begin(whole_layers(2, 4), "b", "b", with_weights=True)
    mesh.home.migrator.lose_host("a", "gone")
    told.add(mesh.home.step())
    mesh.switch("b")
    assert [one.move_id for one in mesh.home.placement.placed] == ["b"]
    assert list(mesh.home.model.weights.layers) == [0, 1]
    plain = core_of(model_of("gqa"))
    begin(plain, generation(prompt_of(40), "x"))
    assert drain(mesh.home, told=told).tokens == drain(plain).tokens
    check_baseline(mesh.home)


def test_a_second_module_with_fewer_blocks_does_not_break_the_first() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=120))
    mesh.away(heads_of(0, 4, (1,)), "a")
    told = Told()
    for one in range(4):
        begin(mesh.home, generation(prompt_of(100, one), f"s{one}"))
    for _ in range(8):
        told.add(mesh.home.step())
    for one in range(3):
        mesh.home.sequences.abort(f"s{one}")
    host = mesh.hosts["host"]
    granted = host.hosted.open("home", "b", heads_of(0, 4, (2,)), num_blocks_wanted=40, num_blocks_least=1)
    placed = PlacedModule(move_id="b", module=heads_of(0, 4, (2,)), worker="host", num_blocks=granted)
    before = mesh.home.sequences.by_id["s3"].blocks
    assert max(before) >= granted
    mesh.home.migrator.begin(placed, mesh.host("host"), None)
    assert max(mesh.home.sequences.by_id["s3"].blocks) < granted
    mesh.switch("b")
    drain(mesh.home, told=told)
    assert len(mesh.home.placement.placed) == 2  # the host was not lost
    plain = core_of(model_of("gqa"))
    begin(plain, generation(prompt_of(100, 3), "s3"))
    assert told.tokens["s3"] == drain(plain).tokens["s3"]


def test_weights_do_not_leave_when_a_guest_came_to_use_them_meanwhile() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    mesh.begin(whole_layers(0, 2), "m", with_weights=True)
    mesh.home.hosted.open("guest", "theirs", whole_layers(1, 2), num_blocks_wanted=4, num_blocks_least=1)
    with pytest.raises(MoveRefused, match="other instances"):
        mesh.switch("m")
    mesh.home.migrator.cancel("m")
    assert list(mesh.home.model.weights.layers) == [0, 1, 2, 3]


def test_blocks_that_came_free_while_a_move_could_not_have_them_are_there_after_it() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=120))
    mesh.home.hosted.open("guest", "theirs", heads_of(0, 4, (0,)), num_blocks_wanted=60, num_blocks_least=1)
    assert mesh.home.load().num_blocks == 100
    mesh.place(heads_of(0, 4, (1,)), "m")
    placed = PlacedModule(move_id="m", module=heads_of(0, 4, (1,)), worker="host", num_blocks=100)
    mesh.home.migrator.begin(placed, mesh.host("host"), None)
    mesh.home.hosted.close("guest", "theirs")
    assert mesh.home.load().num_blocks == 100  # more than that the host does not hold
    mesh.home.migrator.cancel("m")
    mesh.home.step()
    assert mesh.home.load().num_blocks == 120
