import asyncio

from hypothesis import given
from hypothesis import strategies as st
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.generation import TokenDelta, TokenFrame
from libs.worker.outbox import MAX_FRAME_DELTAS, TokenOutbox
from libs.worker.recent_requests import MAX_KEPT, RecentRequests
from libs.worker.token_sender import TokenSender


def delta(number: int, detail: str = "") -> TokenDelta:
    return TokenDelta(request_id="r", index=number, token_ids=(number,), detail=detail)


def numbers(deltas: list[TokenDelta]) -> list[int]:
    return [one.index for one in deltas]


def test_gateways_take_turns_and_waiting_batches_of_one_are_joined() -> None:
    outbox = TokenOutbox(max_deltas=100)
    outbox.add("a", [delta(0), delta(1)])
    outbox.add("b", [delta(2)])
    outbox.add("a", [delta(3)])
    outbox.add("a", [delta(4)])
    taken = [outbox.take() for _ in range(3)]
    assert [(t[0], numbers(t[1])) if t else None for t in taken] == [("a", [0, 1, 3, 4]), ("b", [2]), None]
    assert outbox.num_deltas == 0


def test_what_is_put_back_goes_first() -> None:
    outbox = TokenOutbox(max_deltas=100)
    outbox.add("a", [delta(0)])
    taken = outbox.take()
    assert taken is not None
    outbox.add("a", [delta(1)])
    outbox.put_back(*taken)
    assert numbers((outbox.take() or ("", []))[1]) == [0, 1]


def test_a_gateway_that_is_gone_is_forgotten() -> None:
    outbox = TokenOutbox(max_deltas=100)
    outbox.add("a", [delta(0)])
    outbox.forget("a")
    outbox.forget("unknown")
    assert (outbox.take(), outbox.num_deltas) == (None, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300), st.booleans()), max_size=40))
def test_each_gateway_gets_its_deltas_in_order_and_only_the_oldest_are_ever_lost(
    steps: list[tuple[str, int, bool]],
) -> None:
    outbox = TokenOutbox(max_deltas=1000)
    count = 0
    added = dict.fromkeys("abc", 0)
    got: dict[str, list[int]] = {gateway: [] for gateway in "abc"}
    for gateway, size, is_taken in steps:
        outbox.add(gateway, [delta(count + n) for n in range(size)])
        count, added[gateway] = count + size, added[gateway] + size
        assert outbox.num_deltas <= 1000
        taken = outbox.take() if is_taken else None
        if taken:
            assert len(taken[1]) <= MAX_FRAME_DELTAS
            got[taken[0]] += numbers(taken[1])
    while taken := outbox.take():
        got[taken[0]] += numbers(taken[1])
    assert all(indices == sorted(set(indices)) for indices in got.values())
    assert sum(map(len, got.values())) + outbox.num_dropped == sum(added.values())


async def test_frames_wait_for_the_broker_and_one_too_large_is_sent_in_parts() -> None:
    broker = MemoryBroker()
    ours, theirs = MemoryBus(broker), MemoryBus(broker)
    heard: list[int] = []
    frames: list[int] = []
    heard_last = asyncio.Event()

    def hear(frame: TokenFrame) -> None:
        heard.extend(numbers(frame.deltas))
        frames.append(len(frame.deltas))
        if heard[-1] == 7:
            heard_last.set()

    await theirs.subscribe(TokenFrame, hear, at="g")
    sender = TokenSender(ours, "w", max_unsent_deltas=1000)
    running = asyncio.create_task(sender.run())
    ours.disconnect()
    sender.send("g", [delta(0)])
    sender.send("g", [delta(n, detail="x" * (broker.max_payload_bytes // 3)) for n in range(1, 6)])
    sender.send("g", [delta(6, detail="x" * broker.max_payload_bytes)])
    sender.send("g", [delta(7)])
    await asyncio.sleep(0.12)
    assert heard == []
    ours.reconnect()
    await asyncio.wait_for(sender.wait_sent(), 5)
    await asyncio.wait_for(heard_last.wait(), 5)
    assert heard == [0, 1, 2, 3, 4, 5, 7]
    assert len(frames) > 2
    running.cancel()
    await asyncio.gather(running, ours.close(), theirs.close(), return_exceptions=True)


def test_recent_requests_are_those_of_the_last_seconds_and_bounded() -> None:
    recent = RecentRequests()
    recent.add("old", 0.0)
    recent.add("new", 1.5)
    assert recent.ids(1.9) == ("old", "new")
    assert recent.ids(2.5) == ("new",)
    for number in range(2 * MAX_KEPT):
        recent.add(str(number), 3.0)
    assert len(recent.ids(3.0)) == MAX_KEPT
