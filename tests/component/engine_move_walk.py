"""A home and two hosts, on whom anything may come in any order, for tests that draw it."""

from collections.abc import Callable
from functools import cache

import torch
from engine_moves import Mesh, Told, begin, check_baseline, core_of, drain, generation, model_of, prompt_of

from libs.engine.errors import EngineError, NotYet
from libs.engine.hosting.port import HostLost
from libs.engine.outputs import LayerOutput
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import BadPlacement
from libs.request.generation import Generation

MODULES = (
    whole_layers(0, 1),
    whole_layers(1, 3),
    whole_layers(3, 4),
    heads_of(0, 4, (0,)),
    heads_of(0, 4, (1, 2)),
    heads_of(2, 3, (1,)),
    remote_blocks(4),
)
NUM_KINDS = 4


@cache
def expected(kind: int) -> tuple[list[int], torch.Tensor]:
    """Tokens of a prompt of this kind without moves, and its KV by layers."""
    heard: list[LayerOutput] = []
    core = core_of(model_of("gqa"), on_layers=heard.extend, max_num_batched_tokens=512)
    begin(core, asked("x", kind))
    tokens = drain(core).tokens["x"]
    begin(core, asked("y", kind), hand_over=True)
    drain(core)
    return tokens, torch.stack([by_token([one], kind) for one in heard])


def by_token(parts: list[LayerOutput], kind: int) -> torch.Tensor:
    """KV of a layer, `[heads, 2, prompt tokens, head_dim]`; the last block may be filled in part."""
    blocks = torch.cat([one.blocks for one in parts])
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : num_tokens(kind)]


def num_tokens(kind: int) -> int:
    return 9 + 17 * kind


def asked(name: str, kind: int) -> Generation:
    return generation(prompt_of(num_tokens(kind), kind), name, max_tokens=12)


class Walk:
    """One home, two hosts, whatever happens to them."""

    def __init__(self) -> None:
        self.out: list[LayerOutput] = []
        core = core_of(
            model_of("gqa"),
            num_blocks=34,
            max_num_batched_tokens=40,
            max_num_seqs=16,
            on_layers=self.out.extend,
        )
        self.mesh, self.told = Mesh(core), Told()
        self.kinds: dict[str, int] = {}
        self.handed: set[str] = set()
        self.may_fail = self.handed
        self.aborted: set[str] = set()
        self.num_moves = 0
        self.under_way = ""

    def step(self) -> None:
        self.told.add(self.mesh.home.step())
        for one in self.out:
            self.mesh.home.budget.release(one)
        self.close_what_is_home()

    def arrive(self, kind: int, hand_over: bool) -> None:
        name = f"s{len(self.kinds)}"
        one = asked(name, kind)
        if self.mesh.home.sequences.reserve(one, name, whole_prompt=False) is not None:
            self.mesh.home.sequences.begin(name, num_computed_tokens=0, hand_over=hand_over)
            self.kinds[name] = kind
            if hand_over:
                self.handed.add(name)

    def crowd(self) -> None:
        for kind in range(NUM_KINDS):
            self.arrive(kind, hand_over=False)

    def abort(self, index: int) -> None:
        live = [name for name in self.kinds if name in self.mesh.home.sequences.by_id]
        if live:
            name = live[index % len(live)]
            self.mesh.home.sequences.abort(name)
            self.aborted.add(name)

    def away(self, module: Module, worker: str, with_weights: bool) -> None:
        if self.under_way:
            return
        self.num_moves += 1
        move_id = f"m{self.num_moves}"
        try:
            self.mesh.home.placement.with_module(self.mesh.named(module, move_id, worker))
            with_weights = with_weights and module in MODULES[:3]
            self.mesh.begin(module, move_id, worker, with_weights=with_weights, lent=12)
        except (BadPlacement, EngineError):
            self.close_what_is_home()
            return
        self.under_way = move_id

    def home(self, index: int) -> None:
        placed = self.mesh.home.placement.placed
        if placed and not self.under_way:
            self.under_way = placed[index % len(placed)].move_id
            self.mesh.begin_return(self.under_way)

    def go_on(self, act: Callable[[str], object], *, ends: bool = False) -> None:
        if not self.under_way:
            return
        try:
            act(self.under_way)
        except NotYet:
            return
        except (HostLost, EngineError):
            ends = True
            self.mesh.home.migrator.cancel(self.under_way)
        if ends:
            self.under_way = ""
        self.close_what_is_home()

    def copy(self) -> None:
        self.go_on(lambda move_id: self.mesh.home.migrator.copy_some(move_id, 20_000))

    def switch(self) -> None:
        self.go_on(self.mesh.switch, ends=True)

    def cancel(self) -> None:
        self.go_on(lambda move_id: self.mesh.home.migrator.cancel(move_id), ends=True)

    def break_(self, worker: str, num_calls: int) -> None:
        self.mesh.fuses.setdefault(worker, num_calls)  # one that missed calls cannot come back

    def lose(self, worker: str) -> None:
        self.mesh.home.migrator.lose_host(worker, "its lease ended")
        self.close_what_is_home()

    def close_what_is_home(self) -> None:
        """As the worker does: what is not placed, and is not about to be, is closed at the host."""
        home = self.mesh.home
        if self.under_way and not home.migrator.is_under_way:
            self.under_way = ""
        kept = {one.move_id for one in home.placement.placed} | {self.under_way}
        for worker, host in self.mesh.hosts.items():
            for one in host.hosted.hosted():
                if one.move_id not in kept:
                    host.hosted.close("home", one.move_id)
            if not host.hosted.hosted():
                self.mesh.fuses.pop(worker, None)  # it lives on as another incarnation

    def end(self) -> None:
        for worker in [worker for worker, left in self.mesh.fuses.items() if left < 0]:
            self.lose(worker)
        self.mesh.fuses.clear()
        self.cancel()
        drain(self.mesh.home, lambda _: self.close_what_is_home(), self.told)
        for one in self.out:
            self.mesh.home.budget.release(one)


def check_ends(walk: Walk) -> None:
    """Each sequence has its tokens, or was told why not, with none that is wrong before that."""
    for name, kind in walk.kinds.items():
        tokens, kv = expected(kind)
        told = walk.told.tokens.get(name, [])
        if name in walk.aborted or name in walk.told.failed:
            assert told == tokens[: len(told)]
            continue
        assert told == (tokens[:1] if name in walk.handed else tokens)
        if name in walk.handed:
            for layer in range(4):
                parts = [one for one in walk.out if one.sequence_id == name and one.layer == layer]
                torch.testing.assert_close(by_token(parts, kind), kv[layer])
    assert set(walk.told.failed.values()) <= {"peer_lost"}
    assert set(walk.told.failed) <= walk.may_fail
    check_baseline(walk.mesh.home)
