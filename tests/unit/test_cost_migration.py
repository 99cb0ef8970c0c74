"""What modules on other workers cost: the figures of the paper's 13B model, and what must rise with what."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.cost.migration import (
    LinkCost,
    ModelShape,
    heads_back_bytes,
    heads_out_bytes,
    hidden_bytes,
    kv_bytes,
    layer_overhead_seconds,
    module_token_bytes,
    move_seconds,
    run_overhead_seconds,
    send_seconds,
    shape_of,
    step_bytes,
    step_overhead_seconds,
    weight_bytes,
)
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers

OF_13B = ModelShape(
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    hidden_size=5120,
    element_bytes=2,
    layer_weight_bytes=2 * (4 * 5120 * 5120 + 3 * 5120 * 13824 + 2 * 5120),
    layer_memory_bytes=4 * (4 * 5120 * 5120 + 3 * 5120 * 13824 + 2 * 5120),
    block_size=16,
)
GROUPED = msgspec.structs.replace(OF_13B, num_kv_heads=8)
LINK = LinkCost(bytes_per_second=1e9, latency_seconds=1e-3)

links = st.builds(LinkCost, st.floats(1e3, 1e12), st.floats(0, 1.0))
shapes = st.builds(
    lambda groups, **sizes: ModelShape(num_heads=groups * sizes["num_kv_heads"], **sizes),
    groups=st.integers(1, 8),
    num_layers=st.integers(2, 80),
    num_kv_heads=st.integers(2, 64),
    head_dim=st.integers(1, 128).map(lambda half: 2 * half),
    hidden_size=st.integers(1, 16384),
    element_bytes=st.sampled_from([2, 4]),
    layer_weight_bytes=st.integers(1, 1 << 34),
    layer_memory_bytes=st.integers(1, 1 << 35),
    block_size=st.integers(1, 256),
)
seconds = st.floats(0, 10.0)
tokens = st.integers(1, 8192)


@st.composite
def shapes_and_modules(draw: st.DrawFn) -> tuple[ModelShape, Module]:
    shape = draw(shapes)
    first = draw(st.integers(0, shape.num_layers - 2))
    end = draw(st.integers(first + 1, shape.num_layers - 1))
    num_heads = draw(st.integers(1, shape.num_kv_heads - 1))
    heads = heads_of(first, end, tuple(range(num_heads)))
    return shape, draw(st.sampled_from([whole_layers(first, end), heads, remote_blocks(shape.num_layers)]))


# Figures


def test_a_layer_of_13b_has_634_mb_of_weights_and_20_kib_of_kv_per_token() -> None:
    layer = whole_layers(3, 4)
    assert weight_bytes(OF_13B, layer, with_weights=True) == pytest.approx(634e6, rel=1e-3)
    assert module_token_bytes(OF_13B, layer) == OF_13B.layer_token_bytes == 20 * 1024
    assert OF_13B.block_bytes == 40 * 16 * 20 * 1024
    assert module_token_bytes(GROUPED, layer) == 4 * 1024


def test_bytes_of_moved_heads_are_those_of_the_formula() -> None:
    b, d, h_q, h_kv = 16, 128, 10, 2
    assert heads_out_bytes(b, head_dim=d, num_heads=h_q, num_kv_heads=h_kv) == 2 * b * d * (h_q + 2 * h_kv)
    assert heads_back_bytes(b, head_dim=d, num_heads=h_q) == 2 * b * d * h_q
    assert hidden_bytes(b, hidden_size=5120) == 2 * b * 5120
    assert step_bytes(GROUPED, heads_of(0, 4, (6, 7)), b) == (2 * b * d * 14, 2 * b * d * 10)


def test_float32_doubles_what_travels() -> None:
    wide = msgspec.structs.replace(GROUPED, element_bytes=4)
    for module in (whole_layers(0, 3), heads_of(0, 3, (1,))):
        out, back = step_bytes(GROUPED, module, 7)
        assert step_bytes(wide, module, 7) == (2 * out, 2 * back)


def test_lent_blocks_answer_in_float32_with_a_log_sum_exp_per_row() -> None:
    out, back = step_bytes(GROUPED, remote_blocks(40), 3)
    assert out == 2 * 3 * 128 * (40 + 2 * 8)
    assert back == 4 * 3 * 40 * 129


def test_moving_a_layer_takes_weights_and_kv_over_the_rate_and_the_synchronisation() -> None:
    layer, num_blocks = whole_layers(0, 1), 1000
    kv = kv_bytes(OF_13B, layer, num_blocks)
    assert kv == 1000 * 16 * 20480
    weights = weight_bytes(OF_13B, layer, with_weights=True)
    assert move_seconds(LINK, weights, kv, sync_seconds=0.01) == pytest.approx(0.6344 + 0.32768 + 0.01, 1e-3)
    assert weight_bytes(OF_13B, layer, with_weights=False) == 0


def test_only_whole_layers_bring_weights() -> None:
    assert weight_bytes(OF_13B, heads_of(0, 4, (0,)), with_weights=True) == 0
    assert weight_bytes(OF_13B, remote_blocks(40), with_weights=True) == 0


def test_remote_attention_hides_behind_the_homes_own() -> None:
    def overhead(local: float) -> float:
        return layer_overhead_seconds(
            LINK, 1e6, 5e5, remote_attention_seconds=2e-3, local_attention_seconds=local
        )

    assert overhead(0.0) == pytest.approx(1e-3 + 1e-3 + 2e-3 + 5e-4 + 1e-3)
    assert overhead(5e-3) == pytest.approx(5e-4)
    assert overhead(6e-3) == 0.0


def test_layers_pay_once_for_their_run_and_heads_in_every_layer() -> None:
    def overhead(module: Module) -> float:
        return step_overhead_seconds(LINK, GROUPED, module, 4)

    assert (
        overhead(whole_layers(0, 20))
        == overhead(whole_layers(0, 1))
        == run_overhead_seconds(LINK, GROUPED, 4)
    )
    assert overhead(heads_of(0, 20, (0,))) == pytest.approx(20 * overhead(heads_of(0, 1, (0,))))


def test_a_step_without_tokens_costs_nothing_and_fewer_are_refused() -> None:
    assert step_overhead_seconds(LINK, GROUPED, whole_layers(0, 1), 0) == 0.0
    with pytest.raises(ValueError, match="-1 tokens"):
        step_overhead_seconds(LINK, GROUPED, whole_layers(0, 1), -1)


# What a presence tells

PRESENCE = Presence(
    kind=ServiceKind.DECODE_WORKER,
    name="decode-0",
    incarnation="a",
    state=ServiceState.READY,
    num_layers=40,
    block_bytes=OF_13B.block_bytes,
    num_kv_heads=40,
    hidden_size=5120,
    head_dim=128,
    num_heads=40,
    element_bytes=2,
    layer_weight_bytes=OF_13B.layer_weight_bytes,
    layer_memory_bytes=OF_13B.layer_memory_bytes,
)


def test_a_presence_tells_its_models_shape() -> None:
    assert shape_of(PRESENCE) == OF_13B


@pytest.mark.parametrize("field", [*OF_13B.__struct_fields__[:-1], "block_bytes"])
def test_a_presence_that_does_not_tell_all_has_no_shape(field: str) -> None:
    assert shape_of(msgspec.structs.replace(PRESENCE, **{field: 0})) is None


# What must rise with what


@given(links, shapes_and_modules(), tokens, seconds, seconds, seconds)
def test_overhead_rises_with_tokens_and_remote_time_and_falls_with_own_time(
    link: LinkCost, cut: tuple[ModelShape, Module], num: int, remote: float, local: float, more: float
) -> None:
    def overhead(num_tokens: int, remote_seconds: float, local_seconds: float) -> float:
        return step_overhead_seconds(
            link,
            *cut,
            num_tokens,
            remote_attention_seconds=remote_seconds,
            local_attention_seconds=local_seconds,
        )

    now = overhead(num, remote, local)
    assert now >= 0
    assert overhead(2 * num, remote, local) >= now
    assert overhead(num, remote + more, local) >= now
    assert overhead(num, remote, local + more) <= now


@given(links, shapes_and_modules(), tokens, st.floats(1.0, 100.0), seconds)
def test_a_faster_link_never_costs_more(
    link: LinkCost, cut: tuple[ModelShape, Module], num: int, faster: float, slower: float
) -> None:
    fast = LinkCost(link.bytes_per_second * faster, link.latency_seconds)
    late = LinkCost(link.bytes_per_second, link.latency_seconds + slower)
    for cost in (
        lambda one: step_overhead_seconds(one, *cut, num),
        lambda one: move_seconds(one, 1e9, kv_bytes(*cut, num)),
        lambda one: send_seconds(one, num),
    ):
        assert cost(fast) <= cost(link) <= cost(late)


@given(links, shapes_and_modules(), st.integers(0, 10**6), st.integers(0, 10**6), seconds)
def test_a_move_takes_longer_the_more_there_is_to_move(
    link: LinkCost, cut: tuple[ModelShape, Module], num_blocks: int, more: int, sync: float
) -> None:
    shape, module = cut
    kv, kv_of_more = (kv_bytes(shape, module, num) for num in (num_blocks, num_blocks + more))
    weights = weight_bytes(shape, module, with_weights=True)
    assert move_seconds(link, 0, kv, sync_seconds=sync) <= move_seconds(link, weights, kv, sync_seconds=sync)
    assert move_seconds(link, 0, kv) <= move_seconds(link, 0, kv_of_more)
    assert move_seconds(link, weights, kv) <= move_seconds(link, weights, kv, sync_seconds=sync)


@given(shapes_and_modules(), st.integers(0, 10**6))
def test_kv_of_a_module_is_a_part_of_its_layers(cut: tuple[ModelShape, Module], num_blocks: int) -> None:
    shape, module = cut
    layers = whole_layers(module.first_layer, module.end_layer)
    assert kv_bytes(shape, module, num_blocks) <= kv_bytes(shape, layers, num_blocks)
    assert kv_bytes(shape, layers, num_blocks) <= num_blocks * shape.block_bytes
    assert kv_bytes(shape, remote_blocks(shape.num_layers), num_blocks) == num_blocks * shape.block_bytes


@given(shapes, tokens)
def test_all_heads_apart_are_all_heads_together(shape: ModelShape, num: int) -> None:
    all_heads = tuple(range(shape.num_kv_heads))
    apart = [step_bytes(shape, heads_of(0, 1, (head,)), num) for head in all_heads]
    together = step_bytes(shape, heads_of(0, 1, all_heads), num)
    assert (sum(out for out, _ in apart), sum(back for _, back in apart)) == together
