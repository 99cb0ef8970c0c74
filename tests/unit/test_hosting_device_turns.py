"""What the engine's thread does between layers and while it waits for a host."""

from collections.abc import Callable

import pytest
import torch

from libs.engine.hosting.device_turns import DeviceShare, DeviceTurns
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.mailbox import Mailbox
from libs.engine.meter import Meter
from libs.engine.thread_loop import ThreadLoop


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


class Guests:
    """Each has so many pieces to run, of so many seconds."""

    def __init__(self, clock: Clock, piece_seconds: float = 0.01) -> None:
        self.clock, self.piece_seconds = clock, piece_seconds
        self.left: dict[str, int] = {}
        self.ran: list[str] = []
        self.on_piece: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self.ready())

    def ready(self) -> list[str]:
        return [name for name, count in self.left.items() if count]

    def run_piece(self, name: str) -> None:
        self.left[name] -= 1
        self.ran.append(name)
        self.clock.now += self.piece_seconds
        self.on_piece()


class SleepyMailbox(Mailbox[int]):
    """Time goes by while its taker sleeps; `on_sleep` may bring something."""

    def __init__(self, clock: Clock) -> None:
        self.loop = ThreadLoop()
        self.loop.close()  # what sleeps here is its taker's clock
        super().__init__(self.loop)
        self.clock = clock
        self.slept: list[float] = []
        self.num_turns = 0
        self.on_sleep: Callable[[], None] = lambda: None

    def sleep(self, timeout_seconds: float | None) -> None:
        assert timeout_seconds is not None
        self.slept.append(timeout_seconds)
        before = self.clock.now
        self.on_sleep()
        if self.clock.now == before:
            self.clock.now += timeout_seconds

    def turn(self) -> None:
        self.num_turns += 1


class Scene:
    def __init__(self, share: float = 1.0) -> None:
        self.clock = Clock()
        self.guests = Guests(self.clock)
        self.mailbox = SleepyMailbox(self.clock)
        self.meter = Meter(self.clock)
        self.num_writes = 0
        self.on_write: Callable[[], None] = lambda: None
        self.turns = DeviceTurns(
            self.guests,
            DeviceShare(share, clock=self.clock),
            self.meter,
            self.mailbox,
            self.write,
            self.clock,
        )

    def write(self) -> None:
        self.num_writes += 1
        self.on_write()

    def own_layers(self, count: int, seconds: float = 0.01) -> None:
        for _ in range(count):
            self.clock.now += seconds
            self.turns.between_layers()


def test_between_two_layers_a_guest_runs_as_much_as_the_layers_took() -> None:
    scene = Scene()
    scene.guests.left = {"a": 1000}
    scene.turns.begin_own()
    scene.own_layers(50)
    scene.turns.end_own(1)
    assert 48 <= len(scene.guests.ran) <= 52


def test_guests_share_with_each_other_and_with_own_steps() -> None:
    scene = Scene()
    scene.guests.left = {"a": 1000, "b": 1000}
    scene.turns.begin_own()
    scene.own_layers(50)
    assert abs(scene.guests.ran.count("a") - scene.guests.ran.count("b")) <= 1
    assert 96 <= len(scene.guests.ran) <= 104


def test_a_guest_that_comes_late_does_not_catch_up_with_what_own_steps_had() -> None:
    scene = Scene()
    scene.turns.begin_own()
    scene.own_layers(500)
    scene.guests.left = {"a": 1000}
    scene.own_layers(20)
    assert 18 <= len(scene.guests.ran) <= 22


def test_a_guest_that_comes_late_after_whole_steps_does_not_either() -> None:
    scene = Scene()
    for _ in range(50):
        scene.turns.begin_own()
        scene.clock.now += 0.1
        scene.turns.end_own(1)
    scene.guests.left = {"a": 1000}
    scene.turns.begin_own()
    scene.own_layers(20)
    assert 18 <= len(scene.guests.ran) <= 22


def test_guests_have_the_device_alone_where_own_steps_have_nothing_to_do() -> None:
    scene = Scene()
    scene.guests.left = {"a": 3}
    while scene.turns.run_hosted(is_own_ready=False):
        pass
    assert scene.guests.ran == ["a"] * 3


def test_busy_time_of_own_steps_and_of_guests_is_told_apart() -> None:
    scene = Scene()
    scene.guests.left = {"a": 10}
    scene.turns.begin_own()
    scene.own_layers(30)
    scene.turns.end_own(100)
    assert scene.meter.hosted_share() == pytest.approx(0.1)
    busy_share, tokens_per_second = scene.meter.rates()
    assert busy_share == pytest.approx(0.4)
    assert tokens_per_second == 100.0


def test_a_step_that_waits_for_a_host_runs_guests_and_writes_meanwhile() -> None:
    scene, answer = Scene(), Answer(lambda: None)
    scene.guests.left = {"a": 5}

    def give_after_all() -> None:
        if not scene.guests.has_work:
            answer.give(torch.ones(1))

    scene.guests.on_piece = give_after_all
    scene.turns.begin_own()
    assert scene.turns.wait(answer, 1.0, "w").item() == 1.0
    assert scene.guests.ran == ["a"] * 5
    assert scene.num_writes == 5
    scene.clock.now += 0.02
    scene.turns.end_own(1)
    assert scene.meter.rates()[0] == pytest.approx(0.07)


def test_waiting_for_a_host_is_not_busy() -> None:
    scene, answer = Scene(), Answer(lambda: None)

    def give() -> None:
        scene.clock.now += 0.5
        answer.give(torch.ones(1))

    scene.mailbox.on_sleep = give
    scene.turns.begin_own()
    scene.clock.now += 0.1
    scene.turns.wait(answer, 2.0, "w")
    scene.turns.end_own(1)
    assert scene.meter.rates()[0] == pytest.approx(0.1)


def test_waiting_within_a_write_within_a_wait_is_not_busy_either() -> None:
    scene, answer, room = Scene(share=0.5), Answer(lambda: None), Answer(lambda: None)

    def write() -> None:
        scene.on_write = lambda: None
        scene.turns.wait(room, 2.0, "w")

    def come_to_write() -> None:
        scene.on_write = write

    def sleep(come: Callable[[], None]) -> None:
        scene.clock.now += 0.25
        come()

    comes = iter([come_to_write, lambda: room.give(torch.ones(1)), lambda: answer.give(torch.ones(1))])
    scene.mailbox.on_sleep = lambda: sleep(next(comes))
    scene.turns.begin_own()
    scene.clock.now += 0.5
    scene.turns.wait(answer, 2.0, "w")
    assert scene.clock.now == 11.25
    assert scene.turns.debt_seconds == 0.0  # 0.25 s were saved up at first, and 0.375 while it waited


def test_a_host_that_does_not_answer_in_time_is_lost() -> None:
    scene, answer = Scene(), Answer(lambda: None)
    scene.turns.begin_own()
    with pytest.raises(HostLost, match=r"the host w .* no answer within 1\.5 s") as lost:
        scene.turns.wait(answer, 1.5, "w")
    assert lost.value.worker == "w"
    assert scene.clock.now == pytest.approx(11.5)
    answer.give(torch.ones(1))  # too late: the first end counts
    with pytest.raises(HostLost):
        answer.result()


def test_a_command_may_wait_for_a_host_outside_of_any_step() -> None:
    scene, answer = Scene(), Answer(lambda: None)
    scene.mailbox.on_sleep = lambda: answer.give(torch.ones(1))
    scene.turns.wait(answer, 1.0, "w")
    scene.clock.now += 5
    assert scene.meter.rates() == (0.0, 0.0)


def test_an_answer_that_is_there_is_not_waited_for() -> None:
    scene, answer = Scene(), Answer(lambda: None)
    answer.fail(HostLost("w", "gone"))
    with pytest.raises(HostLost, match="gone"):
        scene.turns.wait(answer, 1.0, "w")
    assert scene.mailbox.slept == []


def test_with_a_share_of_the_device_steps_and_guests_stretch_over_time() -> None:
    scene = Scene(share=0.25)
    scene.guests.left = {"a": 10_000}
    scene.turns.begin_own()
    began = scene.clock.now
    scene.own_layers(200)
    took = scene.clock.now - began
    busy = 200 * 0.01 + len(scene.guests.ran) * 0.01
    assert 190 <= len(scene.guests.ran) <= 210
    assert busy == pytest.approx(0.25 * took + 0.25, abs=0.03)
    assert scene.num_writes == len(scene.mailbox.slept) > 0


def test_a_wait_for_a_host_fills_the_share_up_again() -> None:
    scene, answer = Scene(share=0.5), Answer(lambda: None)
    scene.turns.begin_own()
    scene.clock.now += 0.75

    def give() -> None:
        scene.clock.now += 1.5
        answer.give(torch.ones(1))

    scene.mailbox.on_sleep = give
    scene.turns.wait(answer, 10.0, "w")
    assert scene.turns.debt_seconds == 0.0
    scene.turns.between_layers()
    assert scene.clock.now == 12.25


def test_without_guests_and_with_the_whole_device_nothing_happens_between_layers() -> None:
    scene = Scene()
    scene.turns.begin_own()
    scene.own_layers(10)
    assert scene.mailbox.slept == []
    assert scene.num_writes == 0


def test_a_mailbox_wakes_its_taker_for_what_is_no_command() -> None:
    loop = ThreadLoop()
    mailbox = Mailbox[int](loop)
    mailbox.wake()
    mailbox.sleep(None)  # what came before is not slept over
    mailbox.sleep(0.0)
    mailbox.put(1)
    mailbox.sleep(None)
    mailbox.sleep(0.0)  # a command that waits does not keep it awake
    mailbox.wake()
    assert mailbox.take_all(wait=True) == [1]
    assert mailbox.take_all(wait=True, timeout_seconds=0.0) == []
    loop.close()
