"""Layers, KV heads and lent blocks move between real workers while streams run: no text tells of it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from handed_over import handed_over
from mesh_moves import Moves, load_on, moves_of
from meshes import NUM_POOL_BLOCKS

from black_box import Mesh

pytestmark = pytest.mark.system
MESH = "moving"

NUM_STREAMS = 16
NUM_TIMES = 3
ANSWER_TOKENS = 96

NUM_CUT_STREAMS = 6
CUT_ANSWER_TOKENS = 6
CUT_LINES, CUT_BLOCKS = 66, 59
"""Blocks of 16 tokens: a prompt that is cut into 30 chunks."""

NUM_LONG_PROMPTS, NUM_LONG_STREAMS = 10, 1
LONG_ANSWER_TOKENS = 4

LAYERS = {"layers": [3, 5]}
ONE_HEAD = {"kv_heads": [1]}
TWO_HEADS = {"kv_heads": [0, 2]}

Reference = Callable[[list[str], int], list[str]]


@pytest.fixture
async def moves(mesh: Mesh) -> AsyncIterator[Moves]:
    """Whatever a test moved is home again at its end, and nothing is held anywhere."""
    async with moves_of(mesh) as moves:
        await moves.bring_home()
        yield moves
        await moves.wait_all_home()
        mesh.wait_idle()


def short_prompts() -> list[str]:
    river = "today I walked along the river and saw many birds. "
    return [f"Letter {i}. Dear friend, " + river * (1 + i % 5) for i in range(NUM_STREAMS)]


LINES = ["A clockmaker from Basel counted raindrops.", "Prices rose by 3.7 % in March.", "def f(n): return n"]


def lines_of(name: str, first: int, num_lines: int) -> str:
    return " ".join(f"{name}.{k}: {LINES[(first + k) % len(LINES)]}" for k in range(num_lines))


def long_prompts() -> list[str]:
    """About 800 to 1200 tokens, alike in nothing but their words."""
    return [lines_of(str(i), i, 50 + 5 * (i % 6)) for i in range(NUM_LONG_PROMPTS)]


def cut_prompts() -> list[str]:
    """Of `CUT_BLOCKS` blocks each, so that what is handed over can be counted."""
    return [lines_of(letter, i, CUT_LINES) for i, letter in enumerate("ABCDEFGHIJKL")]


@pytest.fixture(scope="module")
def short_answers(reference: Reference) -> list[str]:
    return reference(short_prompts(), ANSWER_TOKENS)


@pytest.fixture(scope="module")
def cut_answers(reference: Reference) -> list[str]:
    return reference(cut_prompts(), CUT_ANSWER_TOKENS)


@pytest.fixture(scope="module")
def long_answers(reference: Reference) -> list[str]:
    return reference(long_prompts(), LONG_ANSWER_TOKENS)


def layers_kind(i: int) -> dict[str, Any]:
    return {**LAYERS, "kind": "offload" if i % 2 else "migrate"}


def tell(what: str, records: list[dict[str, Any]]) -> None:
    pauses = sorted(record["pause_seconds"] for record in records)
    mib = sum(record["num_kv_bytes"] + record["num_weight_bytes"] for record in records) / (1 << 20)
    print(
        f"{what}: {len(records)} moves, {mib:.0f} MiB, "
        f"pause median {pauses[len(pauses) // 2] * 1e3:.0f} ms, longest {pauses[-1] * 1e3:.0f} ms"
    )


async def test_every_text_is_that_of_a_mesh_where_nothing_moves(
    mesh: Mesh, moves: Moves, short_answers: list[str]
) -> None:
    records: list[dict[str, Any]] = []
    async with load_on(mesh, short_prompts(), short_answers, ANSWER_TOKENS, NUM_STREAMS) as load:
        for i in range(NUM_TIMES):
            for module in (layers_kind(i), ONE_HEAD, TWO_HEADS):
                records += await moves.away_and_back("decode-0", host="decode-1", **module)
    tell(f"{load.num_right} streams", records)
    assert (load.refused, load.errors) == ([], [])
    assert load.num_right >= NUM_STREAMS
    aways = [record for record in records if not record["is_return"]]
    assert all(record["num_kv_bytes"] for record in aways)
    assert all(record["num_blocks_after"] > record["num_blocks_before"] for record in aways)
    assert {record["kind"] for record in aways} == {"migrate", "offload", "heads"}


@pytest.mark.parametrize("host", ["decode-1", "prefill-0"])
async def test_any_worker_may_be_the_host(
    mesh: Mesh, moves: Moves, short_answers: list[str], host: str
) -> None:
    """Two modules of one instance at once; they come home in the order in which they left."""
    async with load_on(mesh, short_prompts(), short_answers, ANSWER_TOKENS, NUM_STREAMS) as load:
        layers = await moves.done("decode-0", host=host, layers=[0, 2], kind="offload")
        heads = await moves.done("decode-0", host="decode-1", layers=[2, 8], kv_heads=[2])
        await moves.wait_settled()
        for away in (layers, heads):
            await moves.done("decode-0", return_of=away["id"])
    assert (load.refused, load.errors) == ([], [])


async def test_two_workers_host_for_each_other(mesh: Mesh, moves: Moves, short_answers: list[str]) -> None:
    async with load_on(mesh, short_prompts(), short_answers, ANSWER_TOKENS, NUM_STREAMS) as load:
        first = await moves.done("decode-0", host="decode-1", layers=[0, 3], kind="offload")
        second = await moves.done("decode-1", host="decode-0", layers=[5, 8], kind="offload")
        await moves.wait_settled()
        await load.next_right()
        await moves.done("decode-0", return_of=first["id"])
        await moves.done("decode-1", return_of=second["id"])
    assert (load.refused, load.errors) == ([], [])


async def test_prompts_that_are_cut_into_chunks_know_nothing_of_moves(
    mesh: Mesh, moves: Moves, cut_answers: list[str]
) -> None:
    records: list[dict[str, Any]] = []
    async with (
        handed_over(mesh, "prefill-0", CUT_BLOCKS) as handed,
        load_on(mesh, cut_prompts(), cut_answers, CUT_ANSWER_TOKENS, NUM_CUT_STREAMS, is_cold=True) as load,
    ):
        for i in range(NUM_TIMES):
            for module in (layers_kind(i), ONE_HEAD, TWO_HEADS):
                records += await moves.away_and_back("prefill-0", host=f"decode-{i % 2}", **module)
    tell(f"{load.num_right} prompts in chunks", records)
    assert (load.refused, load.errors) == ([], [])
    assert load.num_right >= len(cut_answers)
    assert any(record["num_kv_bytes"] for record in records)
    assert (handed.num_done, handed.num_blocks) == (load.num_asked, load.num_asked * CUT_BLOCKS)
    num_within = sum(handed.switched_within_a_prompt(record) for record in records)
    print(f"{num_within} of {len(records)} switches between two chunks of a prompt")
    assert num_within > len(records) // 3


async def fill_a_pool(mesh: Mesh, long_answers: list[str]) -> str:
    """Long prompts of one session leave more blocks than one decode worker's pool has; returns its name."""
    names = ("decode-0", "decode-1")
    before = {name: mesh.metric_of(name, "kvmesh_prompt_tokens_total") for name in names}
    async with load_on(
        mesh, long_prompts(), long_answers, LONG_ANSWER_TOKENS, NUM_LONG_STREAMS, session="long"
    ) as load:
        await load.next_right(NUM_LONG_PROMPTS)
    assert (load.refused, load.errors) == ([], [])
    taken = {name: mesh.metric_of(name, "kvmesh_prompt_tokens_total") - before[name] for name in names}
    filled = max(taken, key=lambda name: taken[name])
    assert taken[filled] > NUM_POOL_BLOCKS * 16, taken
    return filled


async def test_lent_blocks_come_and_go_while_streams_run(
    mesh: Mesh, moves: Moves, short_answers: list[str], long_answers: list[str]
) -> None:
    """A pool full of what is over: lent blocks are taken before any of it is forgotten."""
    home = await fill_a_pool(mesh, long_answers)
    host = "decode-1" if home == "decode-0" else "decode-0"
    async with load_on(mesh, short_prompts(), short_answers, ANSWER_TOKENS, NUM_STREAMS) as load:
        away = await moves.done(home, host=host, tokens=True, num_blocks=64)
        await load.next_right()
        back = await moves.done(home, return_of=away["id"])
    tell("lent blocks", [away, back])
    assert (load.refused, load.errors) == ([], [])
    assert away["num_blocks_after"] == away["num_blocks_before"] + 64
    assert back["num_kv_bytes"], "some of the lent blocks were in use"


async def test_an_order_for_another_placement_is_refused(moves: Moves) -> None:
    epoch = await moves.epoch("decode-0")
    stale = await moves.order("decode-0", host="decode-1", expected_epoch=epoch + 1, **LAYERS)
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "stale_epoch"), stale.text
    away = await moves.done("decode-0", host="decode-1", expected_epoch=epoch, **LAYERS)
    again = await moves.order("decode-0", return_of=away["id"], expected_epoch=epoch)
    assert again.status_code == 409, again.text
    back = await moves.done("decode-0", return_of=away["id"], expected_epoch=epoch + 1)
    assert back["epoch"] == epoch + 2
