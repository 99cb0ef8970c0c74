"""A home that asks for what cannot be harms itself alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hosting_scene import MODELS, NUM_BLOCKS, Home, HostScene
from msgspec.structs import replace

from libs.engine.errors import MoveRefused
from libs.engine.hosting.calls import (
    Attend,
    AttendLent,
    BeginStep,
    HostedCall,
    MoveBlocks,
    ReadBlocks,
    RunLayers,
    Settle,
    WriteBlocks,
)
from libs.engine.hosting.port import HostLost
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers

MODEL = MODELS["gqa"]
KV = torch.zeros(1, 6, 2, 8, 16)


def opened(host: HostScene, module: Module, guest: str = "home", move_id: str = "m") -> None:
    host.modules.open(guest, move_id, module, num_blocks_wanted=NUM_BLOCKS, num_blocks_least=NUM_BLOCKS)


def ids(*blocks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(blocks, dtype=np.int64)


WRONG_STEPS: dict[str, Callable[[BeginStep], BeginStep]] = {
    "slots below 0": lambda step: replace(step, slots=step.slots - 1000),
    "positions of another number": lambda step: replace(step, positions=step.positions[1:]),
    "positions in int32": lambda step: replace(step, positions=step.positions.astype(np.int32)),
    "tables in int64": lambda step: replace(step, block_tables=step.block_tables.astype(np.int64)),
    "blocks below 0": lambda step: replace(step, block_tables=step.block_tables - 50),
    "contexts beyond the tables": lambda step: replace(step, context_lens=step.context_lens + 100),
    "contexts below 0": lambda step: replace(step, context_lens=step.context_lens - 100),
    "contexts of another number": lambda step: replace(step, context_lens=step.context_lens[1:]),
    "starts that fall": lambda step: replace(step, query_starts=step.query_starts[::-1].copy()),
    "starts that end early": lambda step: replace(step, query_starts=(step.query_starts // 2)),
    "last tokens beyond the step": lambda step: replace(step, last_tokens=ids(0, 99)),
}


@pytest.mark.parametrize("name", list(WRONG_STEPS))
def test_a_step_that_fits_neither_itself_nor_any_cache_is_refused(name: str) -> None:
    host, home = HostScene(MODEL), Home(MODEL, [[3, 1], [2, 4]])
    opened(host, whole_layers(1, 3))
    host.put(WRONG_STEPS[name](home.step([9, 4])))
    with pytest.raises(HostLost, match="BeginStep"):
        host.ask(RunLayers("m", home.hidden[1]))


def step_of(home: Home) -> torch.Tensor:
    home.step([9, 4])
    return home.hidden[1]


WRONG_CALLS: dict[str, HostedCall] = {
    "an unknown move": RunLayers("other", torch.zeros(13, 48)),
    "a module of another kind": Attend("m", 1, KV, KV, KV),
    "a tensor of another shape": RunLayers("m", torch.zeros(12, 48)),
    "a tensor of another dtype": RunLayers("m", torch.zeros(13, 48, dtype=torch.bfloat16)),
    "lent blocks of layers": AttendLent("m", 1, 0, KV, KV, KV),
    "blocks beyond the module": ReadBlocks("m", None, ids(NUM_BLOCKS)),
    "blocks below 0": ReadBlocks("m", None, ids(-1)),
    "a layer that is elsewhere": ReadBlocks("m", 3, ids(0)),
    "KV of another shape": WriteBlocks("m", 1, ids(0), KV),
    "KV of another number of blocks": WriteBlocks("m", None, ids(0, 1), KV),
    "KV of another dtype": WriteBlocks("m", None, ids(0), KV.to(torch.bfloat16)),
    "KV of an unknown move": WriteBlocks("other", None, ids(0), KV),
    "two blocks that become one": MoveBlocks(np.array([[1, 2], [3, 3]])),
    "ids of moved blocks without new ones": MoveBlocks(ids(1)),
    "blocks that move out of the module": MoveBlocks(np.array([[1], [NUM_BLOCKS]])),
}


@pytest.mark.parametrize("name", list(WRONG_CALLS))
def test_a_wrong_call_fails_its_guest_from_then_on_and_no_other(name: str) -> None:
    host, home = HostScene(MODEL), Home(MODEL, [[3, 1], [2, 4]])
    opened(host, whole_layers(1, 3))
    opened(host, whole_layers(1, 3), "neighbour", "n")
    begun = home.step([9, 4])
    for guest in ("home", "neighbour"):
        host.put(begun, guest)
    host.ask(ReadBlocks("m", None, ids(0)))
    host.put(WRONG_CALLS[name])
    good = host.put(RunLayers("m", home.hidden[1]))
    assert torch.equal(host.ask(RunLayers("n", home.hidden[1]), "neighbour"), home.hidden[3])
    for answer in (good, host.put(Settle())):
        host.modules.run_all()
        with pytest.raises(HostLost, match="the-host"):
            answer.result()
    host.modules.close_owner("home")
    opened(host, whole_layers(1, 3))
    assert host.ask(Settle()).numel() == 0


def test_a_step_beyond_the_blocks_of_a_module_is_refused_when_it_runs() -> None:
    host, home = HostScene(MODEL), Home(MODEL, [[30, 1]], num_blocks=40)
    opened(host, whole_layers(1, 3))
    host.put(home.step([9]))
    with pytest.raises(HostLost, match="uses block 30; the module has 24 blocks"):
        host.ask(RunLayers("m", home.hidden[1]))


def test_a_step_beyond_the_lent_blocks_is_refused() -> None:
    host, home = HostScene(MODEL), Home(MODEL, [[30, 1]], num_blocks=40)
    opened(host, remote_blocks(4))
    host.put(home.step([9]))
    with pytest.raises(HostLost, match="24 are lent"):
        host.ask(AttendLent("m", 0, 2, *home.qkv[0]))


@pytest.mark.parametrize("kind", ["layers", "heads", "tokens"])
def test_nothing_runs_before_a_step_was_begun(kind: str) -> None:
    host, home = HostScene(MODEL), Home(MODEL, [[3, 1], [2, 4]])
    hidden = step_of(home)
    q, k, v = home.qkv[1]
    calls: dict[str, tuple[Module, HostedCall]] = {
        "layers": (whole_layers(1, 3), RunLayers("m", hidden)),
        "heads": (heads_of(1, 3, (0,)), Attend("m", 1, q[:, :2], k[:, :1], v[:, :1])),
        "tokens": (remote_blocks(4), AttendLent("m", 1, 0, q, k, v)),
    }
    module, call = calls[kind]
    opened(host, module)
    with pytest.raises(HostLost, match="no step was begun"):
        host.ask(call)


def test_layers_whose_weights_did_not_come_are_told() -> None:
    host, home = HostScene(MODEL), Home(MODEL, [[3, 1], [2, 4]])
    host.modules.open(
        "home", "m", whole_layers(1, 3), num_blocks_wanted=24, num_blocks_least=24, layers={1: MODEL.layer(1)}
    )
    host.put(home.step([9, 4]))
    with pytest.raises(HostLost, match="weights of layer 2"):
        host.ask(RunLayers("m", home.hidden[1]))


def test_a_guest_that_has_nothing_here_is_answered() -> None:
    host = HostScene(MODEL)
    with pytest.raises(HostLost, match="no module of this owner"):
        host.ask(Settle(), "stranger")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (whole_layers(2, 5), "no run of the 4 layers"),
        (whole_layers(3, 3), "no run"),
        (heads_of(0, 4, (3,)), "KV heads"),
        (heads_of(0, 4, (0, 1, 2)), "all KV heads"),
        (remote_blocks(3), "all 4 layers"),
    ],
)
def test_a_module_that_the_model_does_not_have_is_refused(module: Module, why: str) -> None:
    host = HostScene(MODEL)
    with pytest.raises(MoveRefused, match=why):
        opened(host, module)
    assert host.modules.hosted() == ()


def test_a_move_is_opened_once() -> None:
    host = HostScene(MODEL)
    opened(host, whole_layers(1, 3))
    with pytest.raises(MoveRefused, match="here already"):
        opened(host, whole_layers(0, 1))
    opened(host, whole_layers(0, 1), "another home")


def test_own_weights_that_left_cannot_be_lent() -> None:
    host = HostScene(MODEL)
    host.modules.model = MODEL.without_layers(range(1, 2))
    with pytest.raises(MoveRefused, match="layer 1"):
        opened(host, whole_layers(1, 3))
    assert host.modules.num_bytes == host.pool.num_given_up_bytes == 0


def test_a_guest_that_asks_without_end_is_stopped() -> None:
    host = HostScene(MODEL)
    opened(host, whole_layers(1, 3))
    answers = [host.put(Settle()) for _ in range(5000)]
    host.modules.run_all()
    for answer in (answers[0], answers[-1], host.put(Settle())):  # some were lost: nothing makes sense now
        host.modules.run_all()
        with pytest.raises(HostLost, match="calls wait already"):
            answer.result()


def test_what_is_still_queued_for_a_closed_module_breaks_no_other_one() -> None:
    host = HostScene(MODEL)
    opened(host, heads_of(0, 2, (0,)), move_id="stays")
    opened(host, whole_layers(2, 3), move_id="goes")
    kv = torch.ones(1, 3, 2, 8, 16)
    host.put(WriteBlocks("stays", None, ids(1), kv[:, :2]))
    written = host.put(WriteBlocks("goes", None, ids(1), kv))
    read = host.put(ReadBlocks("goes", None, ids(1)))
    host.modules.close("home", "goes")
    assert torch.equal(host.ask(ReadBlocks("stays", None, ids(1))), kv[:, :2])
    assert written.is_done  # whoever holds its memory lets it go
    with pytest.raises(HostLost, match="'goes' was closed"):
        read.result()
