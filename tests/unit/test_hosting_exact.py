"""What a host computes equals what the home would have computed itself."""

import msgspec
import numpy as np
import pytest
import torch
from hosting_scene import BLOCK_SIZE, MODELS, NUM_BLOCKS, Home, HostScene
from msgspec.structs import replace

from kernels.paged_attention.contract import merge_attended
from libs.engine.hosting.calls import (
    Attend,
    AttendLent,
    BeginStep,
    MoveBlocks,
    ReadBlocks,
    RunLayers,
    Settle,
    WriteBlocks,
)
from libs.model.model import Layer
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers

TABLES = [[3, 1, 5], [7, 2, 9], [11, 20, 23]]
STEPS = [[5, 0, 17], [3, 9, 1], [1, 1, 1], [1, 6, 2], [1, 0, 1]]
"""Whole prompts, chunks of prompts and decodes, together."""

every_model = pytest.mark.parametrize("name", list(MODELS))


def open_at(host: HostScene, module: Module, layers: dict[int, Layer] | None = None) -> None:
    granted = host.modules.open(
        "home",
        "m",
        module,
        num_blocks_wanted=NUM_BLOCKS,
        num_blocks_least=NUM_BLOCKS,
        layers=layers,
        weight_bytes=1000 if layers is not None else 0,
    )
    assert granted == NUM_BLOCKS


def with_last(begun: BeginStep, rows: list[int]) -> BeginStep:
    return replace(begun, last_tokens=np.array(rows, dtype=np.int64))


@every_model
@pytest.mark.parametrize("with_weights", [False, True])
def test_hosted_layers_give_the_hidden_states_of_the_home(name: str, with_weights: bool) -> None:
    model = MODELS[name]
    host, home = HostScene(model), Home(model, TABLES)
    layers: dict[int, Layer] | None = {} if with_weights else None
    open_at(host, whole_layers(1, 3), layers)
    if layers is not None:
        layers.update({layer: model.layer(layer) for layer in (1, 2)})  # they come after the opening
    for num_new in STEPS:
        host.put(home.step(num_new))
        assert torch.equal(host.ask(RunLayers("m", home.hidden[1])), home.hidden[3])


def test_of_the_last_layer_only_the_wanted_rows_come_back() -> None:
    model = MODELS["gqa"]
    host, home = HostScene(model), Home(model, TABLES)
    open_at(host, whole_layers(2, 4))
    begun = home.step([4, 9, 2])
    host.put(with_last(begun, [3, 14]))
    torch.testing.assert_close(host.ask(RunLayers("m", home.hidden[2])), home.hidden[4][[3, 14]])
    host.put(with_last(begun, []))
    assert host.ask(RunLayers("m", home.hidden[2])).shape == (0, model.config.hidden_size)


def test_kv_is_stored_also_where_no_row_is_wanted() -> None:
    model = MODELS["gqa"]
    host, home = HostScene(model), Home(model, TABLES)
    open_at(host, whole_layers(2, 4))
    host.put(with_last(home.step([20, 0, 0]), []))
    host.ask(RunLayers("m", home.hidden[2]))
    host.put(home.step([1, 0, 0]))
    assert torch.equal(host.ask(RunLayers("m", home.hidden[2])), home.hidden[4])


@every_model
def test_hosted_heads_attend_like_the_home(name: str) -> None:
    model = MODELS[name]
    heads = (model.config.num_kv_heads - 1,)
    shared = model.config.queries_per_kv_head
    first = heads[0] * shared
    host, home = HostScene(model), Home(model, TABLES)
    open_at(host, heads_of(1, 3, heads))
    for num_new in STEPS:
        host.put(home.step(num_new))
        for layer in (1, 2):
            q, k, v = home.qkv[layer]
            call = Attend("m", layer, q[:, first:], k[:, list(heads)], v[:, list(heads)])
            assert torch.equal(host.ask(call), home.attended[layer][:, first:])


def test_heads_that_are_not_adjacent_are_hosted_in_their_order() -> None:
    model = MODELS["mha"]
    host, home = HostScene(model), Home(model, TABLES)
    open_at(host, heads_of(0, 1, (0, 2)))
    for num_new in STEPS:
        host.put(home.step(num_new))
        q, k, v = (one[:, [0, 2]] for one in home.qkv[0])
        assert torch.equal(host.ask(Attend("m", 0, q, k, v)), home.attended[0][:, [0, 2]])


@every_model
def test_lent_blocks_and_the_blocks_at_home_together_attend_like_all(name: str) -> None:
    """The home's own part is the same computation over the other blocks."""
    model = MODELS[name]
    first_lent = 9
    home = Home(model, [[3, 11, 1], [9, 2, 20], [23, 4, 12]])
    host, rest = HostScene(model), HostScene(model)
    open_at(host, remote_blocks(4))
    open_at(rest, remote_blocks(4))
    for num_new in ([5, 0, 17], [9, 9, 1], [1, 1, 1], [1, 8, 2], [1, 0, 1]):
        begun = home.step(num_new)
        host.put(begun)
        rest.put(mirrored_step(begun, first_lent))
        for layer in range(4):
            q, k, v = home.qkv[layer]
            lent = host.ask(AttendLent("m", layer, first_lent, q, k, v))
            own = rest.ask(AttendLent("m", layer, 100, q, k, v))
            assert lent.dtype == torch.float32
            merged, _ = merge_attended([lent[..., :-1], own[..., :-1]], [lent[..., -1], own[..., -1]])
            torch.testing.assert_close(merged, home.attended[layer], atol=1e-5, rtol=1e-5)


def mirrored_step(begun: BeginStep, first_lent: int) -> BeginStep:
    """The step in which the blocks at home are the ones that are lent: their ids go from 100 on."""
    tables = np.where(begun.block_tables < first_lent, begun.block_tables + 100, 0).astype(np.int32)
    blocks, offsets = begun.slots // BLOCK_SIZE, begun.slots % BLOCK_SIZE
    slots = np.where(blocks < first_lent, blocks + 100, 0) * BLOCK_SIZE + offsets
    return replace(begun, block_tables=tables, slots=slots)


def test_queries_that_see_no_lent_block_say_so() -> None:
    model = MODELS["gqa"]
    host, home = HostScene(model), Home(model, [[1, 12, 3]])
    open_at(host, remote_blocks(4))
    host.put(home.step([12]))
    q, k, v = home.qkv[0]
    lse = host.ask(AttendLent("m", 0, 12, q, k, v))[..., -1]
    assert bool(lse[:BLOCK_SIZE].isneginf().all())
    assert bool(lse[BLOCK_SIZE:].isfinite().all())


def test_blocks_are_written_read_and_follow_their_ids() -> None:
    model = MODELS["gqa"]
    host = HostScene(model)
    open_at(host, heads_of(1, 3, (0, 2)))
    kv = torch.randn(3, 4, 2, BLOCK_SIZE, model.config.head_dim)
    host.ask(WriteBlocks("m", None, np.array([5, 0, 9]), kv))
    assert torch.equal(host.ask(ReadBlocks("m", None, np.array([9, 5]))), kv[[2, 0]])
    assert torch.equal(host.ask(ReadBlocks("m", 2, np.array([0]))), kv[[1], 2:])
    host.ask(WriteBlocks("m", 1, np.array([0]), kv[[0], :2]))
    assert torch.equal(host.ask(ReadBlocks("m", None, np.array([0])))[0, :2], kv[0, :2])
    host.ask(MoveBlocks(np.array([[5, 9, 0], [9, 5, 7]])))
    assert torch.equal(host.ask(ReadBlocks("m", 2, np.array([9, 5, 7]))), kv[[0, 2, 1], 2:])
    assert host.ask(Settle()).numel() == 0


def test_layers_go_on_where_written_kv_ends() -> None:
    """As after a move in the middle of a sequence: its KV came in pieces, then blocks got other ids."""
    model = MODELS["gqa"]
    host, home = HostScene(model), Home(model, TABLES)
    home.step([20, 9, 11])
    open_at(host, whole_layers(1, 3))
    blocks = np.array([3, 1, 5, 7, 2, 11, 20])
    host.put(WriteBlocks("m", None, blocks, home.pool.blocks[blocks][:, 3:9]))
    host.put(MoveBlocks(np.array([[20, 5], [4, 6]])))
    home.pool.blocks[[4, 6]] = home.pool.blocks[[20, 5]]
    home.tables[0][2], home.tables[2][1] = 6, 4
    host.put(home.step([1, 1, 1]))
    assert torch.equal(host.ask(RunLayers("m", home.hidden[1])), home.hidden[3])


def test_what_is_hosted_can_be_told_over_the_bus() -> None:
    host = HostScene(MODELS["gqa"])
    open_at(host, whole_layers(1, 3))
    (told,) = host.modules.hosted()
    assert (told.owner, told.move_id, told.module, told.num_blocks) == (
        "home",
        "m",
        whole_layers(1, 3),
        NUM_BLOCKS,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=type(told)) == told
