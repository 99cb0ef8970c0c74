"""What is fetched of a prompt, when others wait for it, and who puts what prompts share."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from libs.cost.fetch import FetchCost
from libs.cost.plan_fetch import FetchPlan, FetchReason
from libs.cost.prefill import PrefillCost
from libs.kv.runs import runs_of
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams
from libs.worker.settings import WorkerSettings
from libs.worker.stores.kv_uploads import KvUploads
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.prefix_lookup import PrefixLookup, RunLookup
from libs.worker.stores.prefixes import Prefix, Prefixes
from libs.worker.stores.stores import PromptAsked

BLOCK_SIZE, NUM_BLOCKS = 16, 64
LENGTH = NUM_BLOCKS * BLOCK_SIZE + 1
COMPUTE = PrefillCost(step_seconds=0.0, token_seconds=0.001, pair_seconds=1e-12)
FAST, SLOW = FetchCost(1e-4, 1e9), FetchCost(1e-4, 1e3)


def metrics() -> StoreMetrics:
    registry = CollectorRegistry()
    return StoreMetrics(registry, Counter("bytes", "Bytes.", ["direction"], registry=registry))


def prefixes(fetch: FetchCost, *, queued_seconds: float = 0.0, when: Any = "faster") -> Prefixes:
    stores = SimpleNamespace(are_there=True, block_bytes=1024, num_layers=4, fetch_cost=fetch, num_fetching=0)
    engine = SimpleNamespace(
        prefill_cost=lambda: COMPUTE, load=lambda: SimpleNamespace(queued_seconds=queued_seconds)
    )
    settings = WorkerSettings(block_size=BLOCK_SIZE, store_fetch_when=when)
    made: Any = (stores, metrics(), settings)
    return Prefixes(*made, fingerprint="model", engine=engine)  # type: ignore[arg-type]  # all that is read


def prompt(salt: str = "", last: int = 1, length: int = LENGTH) -> Generation:
    token_ids = [*range(length - 1), last]
    return Generation("r", pack_token_ids(token_ids), length, SamplingParams(), "g", 1e12, cache_salt=salt)


def held(prefix: Prefix, num_blocks: int = NUM_BLOCKS) -> Prefix:
    runs = (RunLookup(run, "a", len(run), len(run)) for run in runs_of(num_blocks))
    prefix.found = PrefixLookup(tuple(runs))
    return prefix


@pytest.mark.parametrize(
    ("fetch", "queued_seconds", "when", "num_blocks"),
    [
        (FAST, 0.0, "faster", NUM_BLOCKS),
        (SLOW, 0.0, "faster", 0),
        (SLOW, 0.0, "always", NUM_BLOCKS),
        (SLOW, 1e3, "faster", NUM_BLOCKS),  # it is here before its turn comes
        (SLOW, 10.0, "faster", 0),
    ],
)
async def test_a_prefix_is_fetched_where_that_is_faster_or_hidden_or_asked_for(
    fetch: FetchCost, queued_seconds: float, when: str, num_blocks: int
) -> None:
    some = prefixes(fetch, queued_seconds=queued_seconds, when=when)
    plan = await some.plan(held(some.of(prompt())), 0)
    assert plan.num_blocks == num_blocks


async def test_the_last_token_is_always_left_to_compute() -> None:
    some = prefixes(FAST, when="always")
    whole = held(some.of(prompt(length=LENGTH - 1)))
    assert (len(whole.names), whole.num_findable) == (NUM_BLOCKS, NUM_BLOCKS - 1)
    assert (await some.plan(whole, 0)).num_blocks == NUM_BLOCKS - 1
    assert (await some.plan(whole, NUM_BLOCKS - 1)).num_blocks == 0


def test_only_a_prompt_that_lacks_what_another_fetches_waits_for_it() -> None:
    some = prefixes(FAST)
    first, like, salted, short = (
        held(some.of(one)) for one in (prompt(), prompt(last=9), prompt(salt="x"), prompt(length=200))
    )
    plan = FetchPlan(20, 0.1, FetchReason.FETCH_PART)
    with some.claim(first, 4, plan):
        ended = some.under_way(like, 0)
        assert isinstance(ended, asyncio.Event)
        assert not ended.is_set()
        assert some.under_way(like, 23) is ended
        assert some.under_way(short, 0) is ended
        assert some.under_way(like, 24) is None
        assert some.under_way(salted, 0) is None
    assert ended.is_set()
    assert some.under_way(like, 0) is None


async def test_stores_learn_the_tenants_name_and_nothing_of_its_salt() -> None:
    some = prefixes(FAST)
    asked: list[PromptAsked] = []

    async def find(names: object, who: PromptAsked, **_: object) -> PrefixLookup:
        asked.append(who)
        return PrefixLookup()

    some._stores.find = find  # type: ignore[method-assign,assignment]  # what it is told is all that counts
    await some.find(some.of(msgspec.structs.replace(prompt(salt="secret"), tenant="t1")))
    assert asked == [PromptAsked("r", LENGTH, "t1")]


async def test_what_is_on_its_way_to_a_store_is_not_put_again_and_what_was_dropped_is() -> None:
    tasks: list[asyncio.Task[None]] = []

    def spawn(name: str, work: Any) -> asyncio.Task[None]:
        tasks.append(asyncio.ensure_future(work))
        return tasks[-1]

    stores: Any = SimpleNamespace(num_layers=1, block_bytes=1 << 20)
    puts = KvUploads(stores, spawn, metrics(), max_mib=10)
    names = [bytes([n]) * 16 for n in range(8)]
    lacking = PrefixLookup((RunLookup(range(8), "a", 2, 2),))
    put = puts.begin(names, lacking, "r")
    assert put is not None
    assert puts.num_kept_bytes == 6 << 20
    assert puts.begin(names, lacking, "like") is None
    assert puts.begin([*names[:-1], b"x" * 16], lacking, "too much") is None
    puts.end(put)  # nothing was collected
    assert puts.num_kept_bytes == 0
    assert puts.begin(names, lacking, "again") is not None
