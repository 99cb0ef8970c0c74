"""Publisher and subscriber over a bus that breaks: what one holds, the other knows."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from memory_broker import MemoryBroker
from memory_bus import MemoryBus
from prometheus_client import CollectorRegistry

from libs.bus.messages.kv_events import KvEvents, Tier
from libs.bus.messages.presence import ServiceKind
from libs.kv_events.metrics import watch_publisher
from libs.kv_events.publisher import KvEventPublisher
from libs.kv_events.subscriber import KvSubscriber
from libs.kv_events.view import KvView

NAMES = [number.to_bytes(16, "little") for number in range(3000)]


@dataclass
class Holder:
    """A store, as far as events go."""

    incarnation: str
    bus: MemoryBus
    held: dict[bytes, Tier] = field(default_factory=dict[bytes, Tier])
    is_slow: bool = False

    def __post_init__(self) -> None:
        self.publisher = KvEventPublisher(
            self.bus,
            self.incarnation,
            ServiceKind.KV_STORE,
            (lambda _: self.all_slowly()) if self.is_slow else (lambda _: self.all()),
            interval_seconds=0.01,
            beat_seconds=0.05,
            max_waiting_names=2000,
        )

    def all(self) -> Iterable[tuple[Tier, Sequence[bytes]]]:
        for tier in (Tier.DRAM, Tier.DISK):
            yield tier, [name for name, where in self.held.items() if where is tier]

    async def all_slowly(self) -> Iterable[tuple[Tier, Sequence[bytes]]]:
        await asyncio.sleep(0)
        return list(self.all())

    def store(self, names: Sequence[bytes], tier: Tier = Tier.DRAM) -> None:
        self.held |= dict.fromkeys(names, tier)
        self.publisher.stored(tier, names)

    def remove(self, names: Sequence[bytes], tier: Tier = Tier.DRAM) -> None:
        for name in names:
            del self.held[name]
        self.publisher.removed(tier, names)


class Mesh:
    def __init__(self, max_names: int = 100_000) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.view = KvView(max_names)
        self.subscriber = KvSubscriber(self.bus, self.view)

    @asynccontextmanager
    async def publishing(self, incarnation: str, *, is_slow: bool = False) -> AsyncGenerator[Holder]:
        holder = Holder(incarnation, MemoryBus(self.broker), is_slow=is_slow)
        await holder.publisher.open()
        running = asyncio.create_task(holder.publisher.run())
        try:
            yield holder
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await holder.publisher.close()
            await holder.bus.close()

    def knows(self, holder: Holder) -> bool:
        """All names count, those it must not have as well."""
        return all(
            self.view.tiers_of(holder.incarnation, name)
            == ({holder.held[name]} if name in holder.held else set())
            for name in NAMES
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - a view announces nothing
                await asyncio.sleep(0.005)


@pytest.fixture(params=[100_000])
async def mesh(request: pytest.FixtureRequest) -> AsyncGenerator[Mesh]:
    mesh = Mesh(max_names=request.param)
    await mesh.subscriber.open()
    running = asyncio.create_task(mesh.subscriber.run())
    yield mesh
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await mesh.subscriber.close()
    await mesh.bus.close()


@pytest.mark.parametrize("is_slow", [False, True])
async def test_what_was_there_before_and_what_changes_after_are_both_known(mesh: Mesh, is_slow: bool) -> None:
    async with mesh.publishing("s0", is_slow=is_slow) as holder:
        holder.store(NAMES[:1000], Tier.DISK)
        mesh.subscriber.set_publishers(["s0"])
        await mesh.until(lambda: mesh.knows(holder))
        holder.store(NAMES[1000:1500])
        holder.remove(NAMES[:10], Tier.DISK)
        await mesh.until(lambda: mesh.knows(holder))
        assert mesh.subscriber.num_snapshots_total == 1
        assert mesh.subscriber.num_behind == 0


@pytest.mark.parametrize("mesh", [50], indirect=True)
async def test_a_view_is_not_told_more_than_it_can_hold(mesh: Mesh) -> None:
    async with mesh.publishing("s0") as holder:
        holder.store(NAMES)
        mesh.subscriber.set_publishers(["s0"])
        await mesh.until(lambda: mesh.subscriber.num_snapshots_total == 1)
        assert (len(mesh.view), mesh.view.num_forgotten_total) == (50, 0)
        holder.store([b"new" * 5 + b"!"])
        await mesh.until(lambda: bool(mesh.view.tiers_of("s0", b"new" * 5 + b"!")))
        assert mesh.subscriber.num_snapshots_total == 1


async def test_events_lost_while_the_follower_was_cut_off_are_made_up_for(mesh: Mesh) -> None:
    async with mesh.publishing("s0") as holder:
        mesh.subscriber.set_publishers(["s0"])
        holder.store(NAMES[:100])
        await mesh.until(lambda: mesh.knows(holder))
        mesh.bus.disconnect()
        holder.remove(NAMES[:50])
        await mesh.until(lambda: holder.publisher.num_waiting_names == 0)
        mesh.bus.reconnect()
        await mesh.until(lambda: mesh.knows(holder))
        assert mesh.subscriber.num_snapshots_total == 2


async def test_more_changes_than_can_wait_for_the_broker_end_in_a_snapshot(mesh: Mesh) -> None:
    async with mesh.publishing("s0") as holder:
        mesh.subscriber.set_publishers(["s0"])
        holder.store(NAMES[:10])
        await mesh.until(lambda: mesh.knows(holder))
        registry = CollectorRegistry()
        watch_publisher(registry, holder.publisher)
        holder.bus.disconnect()
        holder.store(NAMES)
        waiting = registry.get_sample_value("kvmesh_kv_events_waiting_names")
        assert waiting == holder.publisher.num_waiting_names <= 2000
        assert registry.get_sample_value("kvmesh_kv_events_overflows_total") == 1
        holder.bus.reconnect()
        await mesh.until(lambda: mesh.knows(holder))


async def test_one_that_departed_is_forgotten_and_its_late_events_are_not_heard(mesh: Mesh) -> None:
    async with mesh.publishing("s0") as holder:
        mesh.subscriber.set_publishers(["s0"])
        holder.store(NAMES[:100])
        await mesh.until(lambda: mesh.knows(holder))
    mesh.subscriber.set_publishers([])
    mesh.subscriber.hear(KvEvents(publisher="s0", kind=ServiceKind.KV_STORE, sequence=99, events=[]))
    assert mesh.view.holders == set()
    await mesh.until(lambda: len(mesh.view) == 0)
    assert mesh.subscriber.num_behind == 0


async def test_a_publisher_that_does_not_answer_is_asked_again_at_its_next_message(mesh: Mesh) -> None:
    mesh.subscriber.set_publishers(["s0"])
    early = KvEvents(publisher="s0", kind=ServiceKind.KV_STORE, sequence=1, events=[])
    mesh.subscriber.hear(early)
    await mesh.until(lambda: mesh.subscriber.num_failures_total == 1)
    async with mesh.publishing("s0") as holder:
        holder.store(NAMES[:20])
        await mesh.until(lambda: mesh.knows(holder))


async def test_many_publishers_are_asked_a_few_at_a_time_and_all_are_known(mesh: Mesh) -> None:
    mesh.subscriber.set_publishers([f"s{n}" for n in range(20)])
    holders: list[Holder] = []

    async def live(number: int, ready: asyncio.Event, over: asyncio.Event) -> None:
        async with mesh.publishing(f"s{number}") as holder:
            holder.store(NAMES[number * 50 : number * 50 + 50])
            holders.append(holder)
            ready.set()
            await over.wait()

    over = asyncio.Event()
    readies = [asyncio.Event() for _ in range(20)]
    async with asyncio.TaskGroup() as tasks:
        for number, ready in enumerate(readies):
            tasks.create_task(live(number, ready, over))
        for ready in readies:
            await ready.wait()
        await mesh.until(lambda: all(mesh.knows(holder) for holder in holders))
        over.set()
