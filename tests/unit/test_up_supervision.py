"""Restarts, back-off and the order of the end."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.up.supervision import (
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    STABLE_SECONDS,
    Supervision,
    backoff_seconds,
)

STAGES = {"gateway": 0, "prefill-0": 1, "decode-0": 1, "kv_store": 2, "router": 2, "nats": 3}


def running(stages: dict[str, int] = STAGES, now: float = 0.0) -> Supervision:
    supervision = Supervision(stages)
    for name in supervision.due(now):
        supervision.started(name, now)
    return supervision


def test_everything_is_due_at_the_start_and_only_once() -> None:
    supervision = Supervision(STAGES)
    assert set(supervision.due(0.0)) == set(STAGES)
    assert running().due(1e9) == []


@given(st.integers(1, 10_000))
def test_backoff_doubles_up_to_its_bound(num_failures: int) -> None:
    delay = backoff_seconds(num_failures)
    assert FIRST_BACKOFF_SECONDS <= delay <= MAX_BACKOFF_SECONDS
    assert backoff_seconds(num_failures + 1) in (2 * delay, MAX_BACKOFF_SECONDS)


def test_a_dead_child_is_due_after_its_backoff_and_not_before() -> None:
    supervision = running()
    death = supervision.died("decode-0", -9, 10.0)
    assert death.restarts_in_seconds == FIRST_BACKOFF_SECONDS
    assert supervision.next_due() == 10.0 + FIRST_BACKOFF_SECONDS
    assert supervision.due(10.0 + FIRST_BACKOFF_SECONDS - 0.01) == []
    assert supervision.due(10.0 + FIRST_BACKOFF_SECONDS) == ["decode-0"]


@given(
    st.lists(st.integers(0, int(8 * STABLE_SECONDS)), min_size=1, max_size=12),
    st.sampled_from([0.0, 1.5, STABLE_SECONDS]),
)
def test_backoff_grows_over_quick_deaths_and_starts_anew_after_a_stable_life(
    lives: list[int], stable_seconds: float
) -> None:
    supervision, now, num_quick = Supervision({"router": 2}, stable_seconds), 0.0, 0
    supervision.started("router", now)
    for life in (quarters / 4 for quarters in lives):  # sums of quarters are exact, so is the bound
        now += life
        num_quick = 1 if life >= stable_seconds else num_quick + 1
        death = supervision.died("router", 1, now)
        assert death.restarts_in_seconds == backoff_seconds(num_quick)
        now += backoff_seconds(num_quick)
        assert supervision.due(now) == ["router"]
        supervision.started("router", now)


def test_a_clean_exit_that_nobody_asked_for_is_a_death_too() -> None:
    assert running().died("router", 0, 1.0).restarts_in_seconds is not None


def test_bad_settings_are_fatal_at_the_first_start_and_not_once_it_has_served() -> None:
    first = running().died("router", 2, 1.0)
    assert first.is_fatal
    assert first.restarts_in_seconds is None
    supervision = running()
    supervision.ready("router")
    assert supervision.died("router", 2, 1.0).restarts_in_seconds is not None


def test_stages_end_one_after_the_other() -> None:
    supervision = running()
    supervision.stop()
    ended: list[list[str]] = []
    while not supervision.is_over:
        stage = supervision.to_end()
        ended.append(sorted(stage))
        for name in stage:
            supervision.ending(name)
            assert name not in supervision.to_end()
        for name in stage:
            supervision.died(name, 0, 1.0)
    assert ended == [["gateway"], ["decode-0", "prefill-0"], ["kv_store", "router"], ["nats"]]


def test_nobody_is_asked_to_end_before_a_stop() -> None:
    assert running().to_end() == []


def test_whoever_waits_for_a_restart_when_all_stops_is_not_started_again() -> None:
    supervision = running({"a": 0, "b": 1})
    supervision.died("b", 1, 0.0)
    supervision.stop()
    assert supervision.due(1e9) == []
    assert supervision.to_end() == ["a"]


@dataclass
class _World:
    """Processes as they really are, driven by what the supervision says."""

    supervision: Supervision
    now: float = 0.0
    alive: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)

    def act(self) -> None:
        for name in self.supervision.due(self.now):
            assert name not in self.alive
            self.supervision.started(name, self.now)
            self.alive.add(name)
        for name in self.supervision.to_end():
            assert name in self.alive
            assert not [n for n in self.alive if STAGES[n] < STAGES[name]], "an earlier stage still runs"
            self.supervision.ending(name)
            self.asked.add(name)

    def die(self, name: str, code: int) -> None:
        self.alive.discard(name)
        self.asked.discard(name)
        self.supervision.died(name, code, self.now)


_EVENT = st.one_of(
    st.tuples(st.just("die"), st.sampled_from(sorted(STAGES)), st.sampled_from([0, 1, -9])),
    st.tuples(st.just("wait"), st.floats(0, 60), st.none()),
    st.tuples(st.just("stop"), st.none(), st.none()),
)


@given(st.lists(_EVENT, max_size=40))
def test_whatever_happens_a_stop_ends_everything_in_order(events: list[tuple[str, object, object]]) -> None:
    world, is_stopping = _World(Supervision(STAGES)), False
    for kind, subject, code in [*events, ("stop", None, None)]:
        world.act()
        if kind == "die" and subject in world.alive:
            world.die(str(subject), int(str(code)))
        elif kind == "wait":
            world.now += float(str(subject))
        elif kind == "stop":
            world.supervision.stop()
            is_stopping = True
        assert not (is_stopping and world.supervision.due(1e9))
    for _ in STAGES:
        world.act()
        for name in sorted(world.asked):
            world.die(name, 0)
    assert world.alive == set()
    assert world.supervision.is_over


@given(st.lists(st.tuples(st.sampled_from(sorted(STAGES)), st.floats(0, 100)), max_size=30))
def test_without_a_stop_every_child_runs_again_within_the_longest_backoff(
    deaths: list[tuple[str, float]],
) -> None:
    world = _World(Supervision(STAGES))
    world.act()
    for name, pause in deaths:
        world.now += pause
        world.act()
        if name in world.alive:
            world.die(name, 1)
    world.now += MAX_BACKOFF_SECONDS
    world.act()
    assert world.alive == set(STAGES)
