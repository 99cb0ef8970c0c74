"""Guests live in memory that the host's own sequences can spare, and give it back."""

import re

import numpy as np
import pytest
import torch
from hosting_scene import BLOCK_SIZE, MODELS, Home, HostScene
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.errors import NoRoom
from libs.engine.hosting.calls import ReadBlocks, RunLayers, WriteBlocks
from libs.engine.hosting.port import HostLost
from libs.placement.module import Module, heads_of, whole_layers

MODEL = MODELS["gqa"]
SLOT_BYTES = 2 * BLOCK_SIZE * 16 * 4
OWN_SLOTS = 12


def open_at(host: HostScene, module: Module, wanted: int, least: int = 1, *, weight_bytes: int = 0) -> int:
    return host.modules.open(
        "home",
        f"m{len(host.modules.hosted())}",
        module,
        num_blocks_wanted=wanted,
        num_blocks_least=least,
        weight_bytes=weight_bytes,
    )


def test_what_a_guest_takes_the_own_pool_lacks_until_it_is_closed() -> None:
    host = HostScene(MODEL, num_blocks=100)
    assert open_at(host, whole_layers(0, 2), 50) == 50  # half a block each
    assert host.pool.num_blocks == 75
    assert host.modules.num_bytes == host.pool.num_given_up_bytes == 50 * 6 * SLOT_BYTES
    host.modules.close("home", "m0")
    assert host.pool.num_blocks == 100
    assert host.modules.num_bytes == host.pool.num_given_up_bytes == 0


def test_weights_that_came_with_a_module_count() -> None:
    host = HostScene(MODEL, num_blocks=100)
    open_at(host, heads_of(0, 4, (1,)), 30, weight_bytes=7 * OWN_SLOTS * SLOT_BYTES)
    assert host.pool.num_blocks == 100 - 10 - 7
    host.modules.close_owner("home")
    assert host.pool.num_blocks == 100


def test_as_many_blocks_are_granted_as_can_be_spared() -> None:
    host = HostScene(MODEL, num_blocks=100)
    host.own.held = set(range(90))
    assert open_at(host, whole_layers(0, 1), 1000) == 40
    assert host.pool.num_blocks == 90
    with pytest.raises(NoRoom, match="0 blocks of"):
        open_at(host, whole_layers(0, 1), 1000)


@pytest.mark.parametrize("wanted", [2**63, 2**64 - 1])
def test_more_blocks_than_any_machine_has_are_as_many_as_can_be_spared(wanted: int) -> None:
    host = HostScene(MODEL, num_blocks=100)
    host.own.held = set(range(90))
    with pytest.raises(NoRoom, match="40 blocks of"):
        open_at(host, whole_layers(0, 1), wanted, least=wanted)
    assert open_at(host, whole_layers(0, 1), wanted) == 40


def test_a_guest_that_needs_more_than_can_be_spared_changes_nothing() -> None:
    host = HostScene(MODEL, num_blocks=100)
    host.own.min_free = 60
    with pytest.raises(
        NoRoom, match=r"80 blocks of .* 81 are asked for; its own sequences need 60 .* or more KV memory"
    ):
        open_at(host, whole_layers(0, 2), 200, least=81)
    assert (host.pool.num_blocks, host.pool.num_given_up_bytes) == (100, 0)
    with pytest.raises(NoRoom):
        open_at(host, whole_layers(0, 1), 1, weight_bytes=41 * OWN_SLOTS * SLOT_BYTES)


def test_where_nothing_is_free_it_is_said_what_holds_the_memory_and_what_to_do() -> None:
    host = HostScene(MODEL, num_blocks=100)
    host.own.held = set(range(90))
    open_at(host, whole_layers(0, 1), 40)
    taken = re.escape(f"{host.modules.num_bytes / (1 << 20):.1f} MiB")
    with pytest.raises(
        NoRoom,
        match=rf"^0 blocks .* need 90 of its 90 blocks .* modules of others have {taken} there: "
        "wait until fewer sequences run there, bring home what it hosts, choose another",
    ):
        open_at(host, whole_layers(1, 2), 1)


def test_a_closed_module_is_gone_and_the_others_of_its_home_stay() -> None:
    host = HostScene(MODEL)
    open_at(host, whole_layers(0, 1), 10)
    open_at(host, whole_layers(1, 2), 10)
    kv = torch.randn(2, 3, 2, BLOCK_SIZE, 16)
    host.ask(WriteBlocks("m1", None, np.array([0, 9]), kv))
    host.modules.close("home", "m0")
    host.modules.close("home", "m0")
    assert torch.equal(host.ask(ReadBlocks("m1", None, np.array([0, 9]))), kv)
    with pytest.raises(HostLost, match="m0"):
        host.ask(ReadBlocks("m0", None, np.array([0])))


def test_calls_that_wait_when_a_guest_is_closed_fail() -> None:
    host = HostScene(MODEL)
    open_at(host, whole_layers(0, 1), 10)
    waiting = host.put(ReadBlocks("m0", None, np.array([0])))
    host.modules.close_owner("home")
    with pytest.raises(HostLost, match="closed"):
        waiting.result()
    with pytest.raises(HostLost, match="no module of this owner"):
        host.ask(ReadBlocks("m0", None, np.array([0])))
    host.modules.close_owner("home")


def test_a_call_between_two_layers_never_writes_where_its_module_was() -> None:
    host, home = HostScene(MODEL), Home(MODEL, [[0, 1]], num_blocks=10)
    open_at(host, whole_layers(0, 3), 10)
    open_at(host, whole_layers(3, 4), 10)
    host.put(home.step([9]))
    waiting = host.put(RunLayers("m0", home.hidden[0]))
    for _ in range(2):
        host.modules.run_piece("home")
    host.modules.close("home", "m0")
    host.pool.blocks.zero_()
    host.modules.run_all()
    assert not host.pool.blocks.any()
    with pytest.raises(HostLost, match="closed under a call"):
        waiting.result()


def test_own_live_blocks_keep_their_content_while_guests_come_and_go() -> None:
    host = HostScene(MODEL, num_blocks=40)
    host.own.held = {3, 20, 39}
    for block in host.own.held:
        host.pool.blocks[block] = float(block)
    open_at(host, whole_layers(0, 3), 40)
    kv = torch.randn(40, 9, 2, BLOCK_SIZE, 16)
    host.ask(WriteBlocks("m0", None, np.arange(40), kv))
    assert host.pool.num_blocks == 10
    assert sorted(float(host.pool.blocks[block].max()) for block in host.own.held) == [3.0, 20.0, 39.0]
    assert torch.equal(host.ask(ReadBlocks("m0", None, np.arange(40))), kv)
    host.modules.close_owner("home")
    assert sorted(float(host.pool.blocks[block].min()) for block in host.own.held) == [3.0, 20.0, 39.0]


@given(data=st.data())
def test_guests_never_share_memory_and_all_of_it_comes_back(data: st.DataObject) -> None:
    host = HostScene(MODEL, num_blocks=60)
    host.own.min_free = data.draw(st.integers(1, 60))
    contents: dict[tuple[str, str], torch.Tensor] = {}
    for number in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) and contents:
            guest, move_id = data.draw(st.sampled_from(sorted(contents)))
            host.modules.close(guest, move_id)
            del contents[guest, move_id]
        else:
            guest, move_id = data.draw(st.sampled_from("abc")), str(number)
            first = data.draw(st.integers(0, 3))
            module = whole_layers(first, data.draw(st.integers(first + 1, 4 if first else 3)))
            try:
                granted = host.modules.open(
                    guest,
                    move_id,
                    module,
                    num_blocks_wanted=data.draw(st.integers(1, 60)),
                    num_blocks_least=1,
                    weight_bytes=data.draw(st.integers(0, 20000)),
                )
            except NoRoom:
                continue
            kv = torch.full((granted, 3 * len(module.layers), 2, BLOCK_SIZE, 16), float(number + 1))
            host.ask(WriteBlocks(move_id, None, np.arange(granted), kv), guest)
            contents[guest, move_id] = kv
        assert host.pool.num_blocks >= host.own.min_blocks()
        host.pool.blocks.fill_(-1.0)
        for (guest, move_id), kv in contents.items():
            assert torch.equal(host.ask(ReadBlocks(move_id, None, np.arange(len(kv))), guest), kv)
    for guest in "abc":
        host.modules.close_owner(guest)
    assert (host.pool.num_blocks, host.pool.num_given_up_bytes, host.modules.hosted()) == (60, 0, ())
