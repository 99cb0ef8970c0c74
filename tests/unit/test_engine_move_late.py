"""The same with hosts that answer late, guests that come and go at home, and KV that comes from outside."""

import random

import pytest
import torch
from engine_move_walk import MODULES, NUM_KINDS, Walk, asked, by_token, check_ends, num_tokens
from engine_moves import SIZE, Mesh, begin, core_of, drain, model_of

from libs.engine.errors import EngineError, NotYet
from libs.engine.hosting.calls import ANSWERED, HostedCall
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.outputs import LayerOutput

HOSTS = ("host", "other")


def kv_of(kind: int) -> list[torch.Tensor]:
    """Blocks of the prompt by layer, as they come from outside."""
    heard: list[LayerOutput] = []
    core = core_of(model_of("gqa"), on_layers=heard.extend, max_num_batched_tokens=512)
    begin(core, asked("x", kind), hand_over=True)
    drain(core)
    assert by_token(heard[:1], kind).shape[2] == num_tokens(kind)
    return [one.blocks for one in heard]


KV = [kv_of(kind) for kind in range(NUM_KINDS)]


class Late:
    """A host that does nothing until it is let; of what nobody waits for some finds no room at once."""

    def __init__(self, walk: "LateWalk", worker: str) -> None:
        self.walk, self.worker = walk, worker

    def call(self, call: HostedCall) -> Answer:
        answer, told = Answer(lambda: None), Answer(lambda: None)
        if self.walk.burns(self.worker):
            answer.fail(HostLost(self.worker, "its fuse has burnt down"))
            return answer
        self.walk.mesh.hosts[self.worker].hosted.put("home", call, answer)
        if isinstance(call, ANSWERED):
            return answer
        if self.walk.draw.random() < 0.8:
            told.give(torch.empty(0))
        return told


class LateMesh(Mesh):
    walk: "LateWalk"

    def host(self, worker: str) -> Late:
        return Late(self.walk, worker)


class LateWalk(Walk):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw
        core = core_of(
            model_of("gqa"),
            num_blocks=draw.choice([34, 40, 60]),
            max_num_batched_tokens=40,
            max_num_seqs=16,
            on_layers=self.out.extend,
            wait=self.wait,
            between_layers=self.between,
        )
        self.mesh = LateMesh(core)
        self.mesh.walk = self
        self.num_blocks = core.load().num_blocks
        self.may_fail = set[str]()
        self.to_come: list[tuple[str, int, int, torch.Tensor]] = []
        self.guests: list[str] = []
        self.leaving: list[str] = []

    def burns(self, worker: str) -> bool:
        fuses = self.mesh.fuses
        if worker not in fuses:
            return False
        fuses[worker] -= 1
        return fuses[worker] < 0

    def pump(self) -> None:
        """Hosts do a piece of what they were asked."""
        for host in self.mesh.hosts.values():
            for name in host.hosted.ready():
                host.hosted.run_piece(name)

    def wait(self, worker: str, answer: Answer) -> torch.Tensor:
        while not answer.is_done:
            self.come(self.draw.random() < 0.3)
            if not any(host.hosted.has_work for host in self.mesh.hosts.values()):
                answer.give(torch.empty(0))  # there is room again
            self.pump()
        return answer.result()

    def between(self) -> None:
        self.come(self.draw.random() < 0.3)
        if self.draw.random() < 0.5:
            self.pump()
        if self.mesh.home.migrator.is_under_way and self.under_way:
            try:
                self.mesh.home.migrator.copy_in_step(self.under_way, self.draw.choice([1, 20_000]))
            except (NotYet, EngineError):
                return

    def come(self, comes: bool = True) -> None:
        """A block of KV from outside."""
        if comes and self.to_come:
            block = self.to_come.pop(self.draw.randrange(len(self.to_come)))
            self.mesh.home.incoming.write(*block)

    def load(self) -> None:
        kind, name, core = self.draw.randrange(NUM_KINDS), f"s{len(self.kinds)}", self.mesh.home
        if core.sequences.reserve(asked(name, kind), name, whole_prompt=True) is None:
            return
        num_computed, self.kinds[name] = self.draw.randrange(num_tokens(kind)), kind
        if hand_over := self.draw.random() < 0.3:
            self.handed.add(name)
        self.may_fail.add(name)
        core.sequences.begin(name, num_computed_tokens=num_computed, awaits_kv=True, hand_over=hand_over)
        for layer, kv in enumerate(KV[kind]):
            for block in range(-(-num_computed // SIZE)):
                self.to_come.append((name, layer, block, kv[block : block + 1].clone()))

    def guest(self) -> None:
        name, most = f"g{self.draw.random()}", self.draw.randrange(1, 60)
        try:
            self.mesh.home.hosted.open(
                "guest", name, self.draw.choice(MODULES), num_blocks_wanted=most, num_blocks_least=1
            )
        except (NotYet, EngineError):
            return
        self.guests.append(name)

    def bid_farewell(self, *, to_all: bool = False) -> None:
        while self.guests and (to_all or self.draw.random() < 0.5):
            self.leaving.append(self.guests.pop())
        for name in list(self.leaving):
            try:
                self.mesh.home.hosted.close("guest", name)
            except NotYet:
                continue
            self.leaving.remove(name)

    def go_away(self) -> None:
        try:
            self.away(
                self.draw.choice((*MODULES, *MODULES[-1:] * 3)),
                self.draw.choice(HOSTS),
                self.draw.random() < 0.5,
            )
        except NotYet:
            self.close_what_is_home()

    def bring_home(self) -> None:
        placed = self.mesh.home.placement.placed
        if placed:
            self.home(self.draw.randrange(len(placed)))

    def act(self) -> None:
        acts = [self.step] * 5 + [self.load, self.go_away, self.bring_home, self.copy, self.switch] * 2
        acts += [self.guest, self.guest, self.bid_farewell, self.pump, self.come, self.cancel]
        acts += [lambda: self.arrive(self.draw.randrange(NUM_KINDS), hand_over=False)] * 3
        self.draw.choice(acts)()
        if self.draw.random() < 0.02:
            self.break_(self.draw.choice(HOSTS), self.draw.randrange(30))
        if self.draw.random() < 0.02:
            self.lose(self.draw.choice(HOSTS))

    def end(self) -> None:
        while self.to_come:
            self.come()
        super().end()
        drain(self.mesh.home, lambda _: self.bid_farewell(to_all=True), self.told)
        super().end()


@pytest.mark.parametrize("seed", range(100))
def test_whatever_waits_for_whatever_the_tokens_are_right(seed: int) -> None:
    walk = LateWalk(random.Random(seed))
    for kind in range(NUM_KINDS):
        walk.arrive(kind, hand_over=kind == 2)
    walk.may_fail |= walk.handed
    for _ in range(60):
        walk.act()
    walk.end()
    check_ends(walk)
    for one in walk.mesh.home.placement.placed:
        walk.mesh.begin_return(one.move_id)
        walk.mesh.switch(one.move_id)
    walk.close_what_is_home()
    assert walk.mesh.home.load().num_blocks == walk.num_blocks
