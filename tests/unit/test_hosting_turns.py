"""Fair turns between own steps and guests."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from libs.engine.hosting.device_turns import OWN, FairQueue

LONGEST = 1.0


def test_two_that_always_have_work_alternate_when_their_pieces_are_alike() -> None:
    turns = FairQueue()
    order = []
    for _ in range(6):
        order.append(turns.next([OWN, "guest"]))
        turns.charge(order[-1], 0.01)
    assert order == ["guest", OWN] * 3


def test_long_pieces_are_paid_with_fewer_turns() -> None:
    turns, counts = FairQueue(), {OWN: 0, "guest": 0}
    for _ in range(400):
        name = turns.next([OWN, "guest"])
        counts[name] += 1
        turns.charge(name, 0.03 if name == OWN else 0.01)
    assert 290 <= counts["guest"] <= 310


def test_nobody_saves_up_turns_while_there_is_nothing_to_do() -> None:
    turns = FairQueue()
    turns.next([OWN, "guest"])
    turns.charge("guest", 0.01)
    for _ in range(1000):
        assert turns.next([OWN]) == OWN
        turns.charge(OWN, 1.0)
    taken = []
    for _ in range(10):
        taken.append(turns.next([OWN, "guest"]))
        turns.charge(taken[-1], 1.0)
    assert 4 <= taken.count(OWN) <= 6


def test_nobody_pays_for_what_ran_alone() -> None:
    turns = FairQueue()
    for _ in range(100):
        turns.charge(turns.next([OWN]), 1.0)
    turns.charge(turns.next(["guest"]), 1.0)
    taken = []
    for _ in range(10):
        taken.append(turns.next([OWN, "guest"]))
        turns.charge(taken[-1], 1.0)
    assert 4 <= taken.count(OWN) <= 6


def test_guests_that_stay_away_leave_nothing_behind() -> None:
    def size_after(num_guests: int) -> int:
        turns = FairQueue()
        for number in range(num_guests):
            turns.charge(turns.next([f"guest-{number}"]), 3.0)
        for _ in range(5):
            turns.charge(turns.next([OWN]), 1.0)
        turns.next([OWN, "other"])
        return len(pickle.dumps(turns))

    assert size_after(1000) == size_after(0)


names = st.sampled_from([OWN, "a", "b", "c"])


@given(
    st.lists(
        st.tuples(st.sets(names), st.floats(0.001, LONGEST)),
        min_size=1,
        max_size=200,
    )
)
def test_whoever_has_work_all_the_time_gets_its_share(rounds: list[tuple[set[str], float]]) -> None:
    """`always` is ready throughout: nobody else gets more than it but for two pieces, and it gets its part of
    all that ran."""
    turns = FairQueue()
    spent: dict[str, float] = {}
    for others, seconds in rounds:
        name = turns.next({"always"} | others)
        turns.charge(name, seconds)
        spent[name] = spent.get(name, 0.0) + seconds
    mine = spent.pop("always", 0.0)
    assert all(theirs <= mine + 2 * LONGEST for theirs in spent.values())
    assert mine >= (mine + sum(spent.values())) / 5 - 2 * LONGEST


@given(st.lists(st.tuples(names, st.floats(0.001, LONGEST)), max_size=100), st.floats(0.001, LONGEST))
def test_who_comes_waits_for_one_piece_of_each_other_at_most(
    history: list[tuple[str, float]], seconds: float
) -> None:
    turns = FairQueue()
    for name, cost in history:
        turns.charge(turns.next([name]), cost)
    everybody = [OWN, "a", "b", "c", "newcomer"]
    order: list[str] = []
    while "newcomer" not in order:
        order.append(turns.next(everybody))
        turns.charge(order[-1], seconds)
    assert max(order.count(name) for name in everybody) <= 1
