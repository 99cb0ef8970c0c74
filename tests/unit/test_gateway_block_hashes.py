"""A prompt's blocks are named as the ready workers of the model name them."""

import asyncio

import pytest

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.kv.names import block_names
from services.gateway.generation import block_hashes as module
from services.gateway.generation.block_hashes import BlockLayout, layout_of, parse_layout, prompt_hashes


def worker(
    fingerprint: str,
    kind: ServiceKind = ServiceKind.PREFILL_WORKER,
    *,
    state: ServiceState = ServiceState.READY,
    runs_prompts: bool = False,
) -> Presence:
    return Presence(
        kind=kind,
        name="w",
        incarnation=f"{kind.value}-{fingerprint}",
        state=state,
        model_fingerprint=fingerprint,
        runs_prompts=runs_prompts,
    )


@pytest.mark.parametrize(
    ("told", "layout"),
    [
        ("ab-16", BlockLayout("ab", 16)),
        ("a-b-32", BlockLayout("a-b", 32)),
        ("", None),
        ("ab", None),
        ("-16", None),
        ("ab-", None),
        ("ab-0", None),
        ("ab-x", None),
        ("ab-²", None),
        ("ab-99999999999999999999", None),
    ],
)
def test_a_presence_tells_fingerprint_and_block_size(told: str, layout: BlockLayout | None) -> None:
    assert parse_layout(told) == layout


def test_the_layout_is_that_of_most_ready_workers_that_run_prompts() -> None:
    decode = ServiceKind.DECODE_WORKER
    assert layout_of([]) is None
    assert layout_of([worker("a-16", state=ServiceState.STARTING), worker("b-16", decode)]) is None
    assert layout_of([worker("b-16", decode, runs_prompts=True)]) == BlockLayout("b", 16)
    assert layout_of([worker("a-16"), worker("b-16"), worker("b-16")]) == BlockLayout("b", 16)
    assert layout_of([worker(""), worker(""), worker("a-16")]) == BlockLayout("a", 16)


def test_equal_counts_choose_the_same_in_every_gateway() -> None:
    one, two = worker("a-16"), worker("b-16")
    assert layout_of([one, two]) == layout_of([two, one]) == BlockLayout("b", 16)


@pytest.mark.parametrize("most_on_loop", [10, 1000])
async def test_names_are_those_of_the_workers_here_and_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, most_on_loop: int
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS_ON_LOOP", most_on_loop)
    token_ids = list(range(100))
    joined = await prompt_hashes(BlockLayout("f", 16), token_ids, "salt")
    assert joined == b"".join(block_names(token_ids, 16, "f", "salt"))
    assert len(joined) == 6 * 16


async def test_nothing_is_named_where_no_layout_is_known() -> None:
    assert await prompt_hashes(None, list(range(100)), "") == b""


async def test_others_get_their_turn_between_the_prompts_of_one_request() -> None:
    turns: list[str] = []

    async def name_all() -> None:
        for _ in range(3):
            await prompt_hashes(BlockLayout("f", 16), list(range(100)), "")
            turns.append("named")

    async def others() -> None:
        for _ in range(3):
            turns.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(name_all(), others())
    assert turns == ["other", "named"] * 3
