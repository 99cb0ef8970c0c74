"""Credits: a receiver never holds more than its window, and a sender never waits for ever."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from libs.transport.credits import Credit, LinkLimits, ReceiveWindow, SendWindow, untold_bytes

limits_strategy = st.builds(
    LinkLimits,
    window_frames=st.integers(1, 12),
    window_bytes=st.integers(1, 1000),
    max_body_bytes=st.just(5000),
)
body_sizes = st.lists(st.one_of(st.integers(0, 50), st.integers(0, 5000)), max_size=60)


class Exchange:
    """A sender and a receiver that talk at once; `released_each` frames are released after each arrival."""

    def __init__(self, limits: LinkLimits, bodies: list[int]) -> None:
        self.limits, self.to_send = limits, deque(bodies)
        self.sender, self.receiver = SendWindow(limits), ReceiveWindow(limits)
        self.held: deque[int] = deque()
        self.largest_held = Credit(0, 0)

    def send_what_fits(self) -> None:
        while self.to_send and self.sender.can_send(self.to_send[0]):
            num_bytes = self.to_send.popleft()
            self.sender.send(num_bytes)
            assert self.receiver.can_arrive(num_bytes)
            self.receiver.arrive(num_bytes)
            self.held.append(num_bytes)
            assert self.receiver.held == (len(self.held), sum(self.held))

    def release(self, from_the_end: bool) -> None:
        self.receiver.release(self.held.pop() if from_the_end else self.held.popleft())
        if self.receiver.is_credit_due():
            assert self.sender.credit(self.receiver.tell())


@given(limits_strategy, body_sizes, st.lists(st.booleans(), min_size=60, max_size=60))
def test_an_honest_sender_never_overruns_and_gets_everything_through(
    limits: LinkLimits, bodies: list[int], from_the_end: list[bool]
) -> None:
    exchange = Exchange(limits, bodies)
    exchange.send_what_fits()
    for end in from_the_end:
        if exchange.held:
            exchange.release(end)
            exchange.send_what_fits()
    assert not exchange.to_send
    assert not exchange.held


@given(limits_strategy, body_sizes)
def test_a_receiver_that_releases_nothing_holds_at_most_its_window_or_one_large_body_more(
    limits: LinkLimits, bodies: list[int]
) -> None:
    exchange = Exchange(limits, bodies)
    exchange.send_what_fits()
    assert len(exchange.held) <= limits.window_frames
    allowed = max(limits.window_bytes, untold_bytes(limits) + limits.max_body_bytes)
    assert sum(exchange.held) <= allowed


@given(limits_strategy, st.integers(0, 6000))
def test_an_empty_window_takes_any_body_within_the_limit(limits: LinkLimits, num_bytes: int) -> None:
    assert SendWindow(limits).can_send(num_bytes)
    assert ReceiveWindow(limits).can_arrive(num_bytes) == (num_bytes <= limits.max_body_bytes)


def num_that_fit(sender: SendWindow) -> int:
    """Frames that it would send now, one after the other."""
    num_frames = 0
    while sender.can_send(10):
        sender.send(10)
        num_frames += 1
    return num_frames


def test_a_credit_that_comes_late_or_twice_changes_nothing() -> None:
    sender = SendWindow(LinkLimits(window_frames=3))
    for _ in range(3):
        sender.send(10)
    assert sender.credit(Credit(2, 20))
    assert sender.credit(Credit(1, 10))
    assert sender.credit(Credit(2, 20))
    assert num_that_fit(sender) == 2


def test_a_credit_for_more_than_was_sent_is_refused() -> None:
    sender = SendWindow(LinkLimits(window_frames=3))
    sender.send(10)
    assert not sender.credit(Credit(2, 10))
    assert not sender.credit(Credit(1, 11))
    assert num_that_fit(sender) == 2


def test_credit_is_due_at_half_the_frames_or_beyond_the_untold_bytes_and_not_twice() -> None:
    limits = LinkLimits(window_frames=4, window_bytes=800)
    receiver = ReceiveWindow(limits)
    for num_bytes in (1, 1, 1, 101):
        receiver.arrive(num_bytes)
    receiver.release(1)
    assert not receiver.is_credit_due()
    receiver.release(1)
    assert receiver.is_credit_due()
    assert receiver.tell() == (2, 2)
    assert not receiver.is_credit_due()
    receiver.release(101)
    assert receiver.is_credit_due()
