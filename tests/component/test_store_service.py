"""A store on its bus and Links: leases, TTLs, events, trace, egress, and workers that send nonsense."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import generate_latest
from store_scene import (
    BLOCK_BYTES,
    LAYER_BYTES,
    NUM_LAYERS,
    StoreScene,
    Worker,
    names_of,
    store_scene,
)

from libs.bus.errors import HandlerFailed
from libs.bus.messages.kv_events import KvSnapshot, Removed, Stored, Tier
from libs.bus.messages.store import FindPrefix, GroupTtls
from libs.kv.access_trace import hash_ids, read_lines, read_requests, rotated_files
from libs.transport.frames import Fetch, HandOver, PutLayer, PutNames
from libs.transport.port import LinkLost


@pytest.fixture
async def scene() -> AsyncIterator[StoreScene]:
    async with store_scene() as scene:
        yield scene


async def test_runs_are_answered_one_by_one(scene: StoreScene) -> None:
    store = await scene.store()
    worker = await scene.worker(store)
    await worker.put(names_of(1, 3))
    await worker.put(names_of(2, 2))
    await scene.until(lambda: store.gauge("store_num_blocks") == 5)
    answer = await worker.find(names_of(1, 4), names_of(9, 2), names_of(2, 2), [])
    assert answer.num_blocks == answer.num_in_memory == (3, 0, 2, 0)
    assert answer.lease_seconds == 5.0
    assert store.gauge("store_queried_blocks_total") == 8
    assert store.gauge("store_found_blocks_total") == store.gauge("store_tier_hits_total", tier="dram") == 5
    (memory,) = store.service.load().tiers
    assert (memory.num_blocks, memory.num_hit_blocks, memory.num_asked_blocks) == (5, 5, 8)


@pytest.mark.parametrize("lengths", [(2, 2), (-1, 4), (4, -2, 2)])
async def test_runs_that_are_not_the_names_are_an_error_to_who_asks(
    scene: StoreScene, lengths: tuple[int, ...]
) -> None:
    store = await scene.store()
    worker = await scene.worker(store)
    wrong = FindPrefix(names=b"".join(names_of(1, 3)), run_lengths=lengths)
    with pytest.raises(HandlerFailed):
        await worker.bus.request(wrong, to=store.incarnation, timeout_seconds=5)
    with pytest.raises(HandlerFailed):
        await worker.find(names_of(1, 3), run_starts=(0, 32))
    assert (await worker.find([], [])).num_blocks == (0, 0)


async def nonsense(worker: Worker, what: str) -> None:
    """What no worker of ours would send."""
    names = np.frombuffer(b"".join(names_of(66, 4)), dtype=np.uint8)
    put: dict[str, Any] = {"put_id": 7, "num_blocks": 4, "num_layers": NUM_LAYERS, "layer_bytes": LAYER_BYTES}
    layer: dict[str, Any] = {"put_id": 7, "layer": 0, "num_layers": 1, "checksum": 0}
    body = np.zeros(4 * LAYER_BYTES, dtype=np.uint8)
    match what:
        case "absurd sizes":
            await worker.send(PutNames(**put | {"num_layers": 10**9, "layer_bytes": 10**12}), names)
        case "negative sizes":
            await worker.send(PutNames(**put | {"num_layers": -4}), names)
        case "another count":
            await worker.send(PutNames(**put | {"num_blocks": 10**6}), names)
        case "a parent without name":
            await worker.send(PutNames(**put | {"parent": b"x"}), names)
        case "layers of no put":
            await worker.send(PutLayer(**layer), body)
        case "wrong size":
            await worker.send(PutNames(**put), names)
            await worker.send(PutLayer(**layer), body[1:])
        case "layers beyond the last":
            await worker.send(PutNames(**put), names)
            await worker.send(PutLayer(**layer | {"layer": 3, "num_layers": 10**9}), body)
        case "the same id twice":
            await worker.send(PutNames(**put), names)
            await worker.send(PutNames(**put), names)
        case "endless puts":
            for put_id in range(100, 200):
                await worker.send(PutNames(**put | {"put_id": put_id}), names)
        case "half a name":
            await worker.send(PutNames(**put), names[:-3])
        case "half a fetch":
            await worker.send(Fetch(fetch_id=1, num_blocks=1), names[:5])
        case "another's frame":
            await worker.send(HandOver(request_id="x", token_id=1))
        case _:
            await worker.link.send(b"\xff\x00 nonsense", timeout_seconds=5)


@pytest.mark.parametrize(
    "what",
    [
        "absurd sizes",
        "negative sizes",
        "another count",
        "a parent without name",
        "layers of no put",
        "wrong size",
        "layers beyond the last",
        "the same id twice",
        "endless puts",
        "half a name",
        "half a fetch",
        "another's frame",
        "no frame at all",
    ],
)
async def test_nonsense_from_one_worker_harms_no_other(scene: StoreScene, what: str) -> None:
    store = await scene.store(memory_blocks=16)
    good, bad = await scene.worker(store, "good"), await scene.worker(store, "bad")
    await good.put(names_of(1, 8))
    await scene.until(lambda: store.gauge("store_num_blocks") == 8)
    await nonsense(bad, what)
    assert await good.fetch(names_of(1, 8))
    await good.put(names_of(2, 4))
    await scene.until(lambda: store.gauge("store_num_blocks") == 12)
    await bad.link.close()
    await scene.until(lambda: store.gauge("num_links") == 1)
    await scene.until(lambda: store.gauge("store_num_staged_blocks") == 0)
    assert store.gauge("store_used_bytes") == 12 * BLOCK_BYTES
    assert await good.fetch(names_of(1, 8))


async def test_puts_under_way_take_half_of_the_memory_at_most(scene: StoreScene) -> None:
    store = await scene.store(memory_blocks=16)
    good, bad = await scene.worker(store, "good"), await scene.worker(store, "bad")
    await good.put(names_of(1, 8))
    await scene.until(lambda: store.gauge("store_num_blocks") == 8)
    for chain in range(100, 104):
        header = PutNames(put_id=chain, num_blocks=4, num_layers=NUM_LAYERS, layer_bytes=LAYER_BYTES)
        await bad.send(header, np.frombuffer(b"".join(names_of(chain, 4)), dtype=np.uint8))
    await scene.until(lambda: store.gauge("store_puts_total", result="refused") == 2)
    assert store.gauge("store_num_staged_blocks") == 8
    assert await good.fetch(names_of(1, 8))


async def test_frames_that_no_worker_sends_end_the_link(scene: StoreScene) -> None:
    store = await scene.store()
    bad = await scene.worker(store, "bad")
    await nonsense(bad, "another's frame")
    with pytest.raises(LinkLost):
        await bad.link.receive(timeout_seconds=5)


async def test_a_fetch_of_what_is_not_there_is_missed_in_its_turn(scene: StoreScene) -> None:
    store = await scene.store()
    worker = await scene.worker(store)
    await worker.put(names_of(1, 4))
    await scene.until(lambda: store.gauge("store_num_blocks") == 4)
    assert await worker.fetch(names_of(1, 4))
    assert not await worker.fetch(names_of(1, 5))
    assert not await worker.fetch([])
    assert await worker.fetch([*names_of(1, 2), *names_of(1, 2)])
    await scene.until(lambda: store.gauge("store_fetches_total", result="sent") == 2)
    assert store.gauge("store_fetches_total", result="missed") == 2


async def test_groups_expire_by_their_own_time_and_a_newer_epoch_replaces_all(scene: StoreScene) -> None:
    store = await scene.store(lease_seconds=0.001)
    worker = await scene.worker(store)
    chat, tail, other = names_of(1, 2), names_of(1, 2, first=2), names_of(2, 2)
    await worker.put([*chat, *tail])
    await worker.put(other)
    await scene.until(lambda: store.gauge("store_num_blocks") == 6)
    await worker.bus.publish(GroupTtls(epoch=5, rest_ttl_seconds=None, ttl_seconds={tail[0]: 0.05}))
    await scene.until(lambda: store.gauge("store_num_blocks") == 4)
    assert await worker.held([*chat, *tail]) == (2, 2)
    await worker.bus.publish(GroupTtls(epoch=5, rest_ttl_seconds=0.01))
    await worker.bus.publish(GroupTtls(epoch=4, rest_ttl_seconds=0.01))
    await worker.bus.publish(GroupTtls(epoch=6, rest_ttl_seconds=0.05, ttl_seconds={chat[1]: 3600.0}))
    await scene.until(lambda: store.gauge("store_num_blocks") == 2)
    # The chat's first block has no time of its own left, but what hangs from it has.
    assert await worker.held(chat) == (2, 2)
    assert store.gauge("store_expired_blocks_total") == 4
    assert store.gauge("store_ttl_epoch") == 6
    assert store.gauge("store_used_bytes") == 2 * BLOCK_BYTES


async def test_what_expires_leaves_the_disk_too(scene: StoreScene, tmp_path: Path) -> None:
    store = await scene.store(disk_mib=64, folder=tmp_path, lease_seconds=0.001, ttl_seconds=1.5)
    worker = await scene.worker(store)
    await worker.put(names_of(1, 4))
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 4)
    await scene.until(lambda: store.gauge("store_num_blocks") == 0)
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 0)
    assert await store.end() == 0
    again = await scene.store(disk_mib=64, folder=tmp_path)
    assert again.gauge("store_num_blocks") == 0


async def test_events_and_snapshots_tell_what_is_in_which_tier(scene: StoreScene, tmp_path: Path) -> None:
    await scene.listen()
    store = await scene.store(memory_blocks=4, disk_mib=64, folder=tmp_path)
    worker = await scene.worker(store)
    for chain in (1, 2):
        await worker.put(names_of(chain, 4))
        await scene.until(lambda chain=chain: store.gauge("store_tier_blocks", tier="disk") == 4 * chain)
    in_tiers: dict[Tier, set[bytes]] = {Tier.DRAM: set(), Tier.DISK: set()}

    def are_told() -> bool:
        for tier in in_tiers:
            in_tiers[tier].clear()
        for message in scene.events:
            for event in message.events:
                if isinstance(event, Stored | Removed):
                    names = {event.names[at : at + 16] for at in range(0, len(event.names), 16)}
                    apply = in_tiers[event.tier].update if isinstance(event, Stored) else None
                    (apply or in_tiers[event.tier].difference_update)(names)
        return in_tiers[Tier.DRAM] == set(names_of(2, 4)) and len(in_tiers[Tier.DISK]) == 8

    await scene.until(are_told)
    page = await worker.bus.request(KvSnapshot(), to=store.incarnation, timeout_seconds=5)
    assert page.next_page == 0
    told = {stored.tier: len(stored.names) // 16 for stored in page.stored}
    assert told == {Tier.DRAM: 4, Tier.DISK: 8}
    few = await worker.bus.request(KvSnapshot(max_names=3), to=store.incarnation, timeout_seconds=5)
    assert [(stored.tier, len(stored.names) // 16) for stored in few.stored] == [
        (Tier.DRAM, 3),
        (Tier.DISK, 3),
    ]


@pytest.mark.parametrize("setting", ["traces/store-0.jsonl", "traces/"])
async def test_the_trace_can_be_replayed(scene: StoreScene, tmp_path: Path, setting: str) -> None:
    path = tmp_path / "traces" / "store-0.jsonl"
    store = await scene.store(access_trace=f"{tmp_path}/{setting}")
    worker = await scene.worker(store)
    await worker.find(names_of(1, 3), request_id="a", num_tokens=50, tenant="t")
    await worker.put(names_of(1, 3), request_id="a")
    await scene.until(lambda: store.gauge("store_num_blocks") == 3)
    await worker.put(names_of(1, 1, first=3), names_of(1, 3)[-1], request_id="a", num_output_tokens=17)
    await scene.until(lambda: store.gauge("store_num_blocks") == 4)
    await worker.find(names_of(1, 5), request_id="b", num_tokens=80)
    later, first_run = names_of(2, 2, first=32), names_of(2, 3)
    await worker.find(later, first_run, run_starts=(32, 0), request_id="c", num_tokens=40)
    assert await store.end() == 0
    first = msgspec.json.decode(path.read_bytes().splitlines()[0])
    assert {"timestamp", "input_length", "output_length", "hash_ids"} <= set(first)
    lines = list(read_lines(rotated_files(path)))
    assert [line.kind for line in lines] == ["lookup", "put", "put", "lookup", "lookup"]
    assert (lines[3].num_memory_hits, lines[3].num_disk_hits, lines[0].tenant) == (4, 0, "t")
    requests = read_requests(rotated_files(path))
    assert [(r.input_length, r.output_length) for r in requests] == [(50, 17), (80, 0), (40, 0)]
    assert requests[0].timestamp == 0.0
    assert requests[1].hash_ids == hash_ids(names_of(1, 5))
    assert requests[2].hash_ids == hash_ids([*first_run, *later])


async def test_who_asks_what_to_put_is_no_lookup(scene: StoreScene, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    store = await scene.store(
        disk_mib=64, folder=tmp_path / "kv", write_policy="selective", access_trace=str(path)
    )
    worker = await scene.worker(store)
    await worker.put(names_of(1, 4))
    await scene.until(lambda: store.gauge("store_num_blocks") == 4)
    for _ in range(3):
        assert await worker.held(names_of(1, 5)) == (4, 4)
    for name in ("queried_blocks_total", "found_blocks_total", "num_unwritten_blocks"):
        assert store.gauge(f"store_{name}") == 0
    assert store.gauge("store_tier_misses_total", tier="dram") == 0
    await worker.find(names_of(1, 4))
    assert store.gauge("store_tier_blocks", tier="disk") == store.gauge("store_num_unwritten_blocks") == 0
    await worker.find(names_of(1, 4))
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 4)
    assert store.gauge("store_found_blocks_total") == 8
    assert await store.end() == 0
    assert [line.kind for line in read_lines([path])] == ["put", "lookup", "lookup"]


async def test_all_workers_together_get_no_more_than_the_egress_cap(scene: StoreScene) -> None:
    store = await scene.store(fetch_bytes_per_second=16 * BLOCK_BYTES / 0.2)
    workers = [await scene.worker(store, f"worker-{i}") for i in range(2)]
    await workers[0].put(names_of(1, 16))
    await scene.until(lambda: store.gauge("store_num_blocks") == 16)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await asyncio.gather(*(worker.fetch(names_of(1, 16)) for worker in workers for _ in range(2)))
    assert loop.time() - begun >= 0.79  # four fetches of 0.2 s each


async def test_leased_blocks_stay_while_others_come(scene: StoreScene) -> None:
    store = await scene.store(memory_blocks=8, lease_seconds=60)
    worker = await scene.worker(store)
    await worker.put(names_of(1, 8))
    await scene.until(lambda: store.gauge("store_num_blocks") == 8)
    await worker.find(names_of(1, 4))
    await worker.put(names_of(2, 8))
    await scene.until(lambda: store.gauge("store_puts_total", result="refused") == 1)
    await worker.put(names_of(3, 4))
    await scene.until(lambda: store.gauge("store_puts_total", result="held") == 2)
    assert await worker.held(names_of(1, 8)) == (4, 4)


async def test_a_worker_that_dies_leaves_nothing_behind(scene: StoreScene) -> None:
    store = await scene.store(memory_blocks=16, lease_seconds=0.001)
    worker, dying = await scene.worker(store), await scene.worker(store, "dying")
    await worker.put(names_of(1, 8))
    await scene.until(lambda: store.gauge("store_num_blocks") == 8)
    for _ in range(5):
        await dying.ask(names_of(1, 8))
    header = PutNames(put_id=99, num_blocks=4, num_layers=NUM_LAYERS, layer_bytes=LAYER_BYTES)
    await dying.send(header, np.frombuffer(b"".join(names_of(3, 4)), dtype=np.uint8))
    await scene.until(lambda: store.gauge("store_num_staged_blocks") == 4)
    await dying.link.close()
    await scene.until(lambda: store.gauge("store_num_staged_blocks") == 0)
    # Nobody reads the old blocks any more: all of the memory can be had.
    await worker.put(names_of(5, 16))
    await scene.until(lambda: store.gauge("store_puts_total", result="held") == 2)
    assert await worker.held(names_of(1, 8)) == (0, 0)


async def test_every_metric_can_be_scraped(scene: StoreScene, tmp_path: Path) -> None:
    store = await scene.store(disk_mib=64, folder=tmp_path, access_trace=f"{tmp_path}/")
    assert store.runtime is not None
    text = generate_latest(store.runtime.registry).decode()
    for name in ("hits_total", "misses_total", "bytes", "capacity_bytes", "evicted_blocks_total"):
        assert f'kvmesh_store_tier_{name}{{tier="dram"}}' in text
        assert f'kvmesh_store_tier_{name}{{tier="disk"}}' in text
    for name in ("disk_paused", "promoted_blocks_total", "disk_lost_at_open_total", "trace_dropped_total"):
        assert f"kvmesh_store_{name} 0.0" in text
    assert 'kvmesh_store_disk_reads_total{result="corrupt"} 0.0' in text
