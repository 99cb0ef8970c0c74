"""Any order of moves, losses and requests: the right tokens or an explicit end, and nothing held then."""

from engine_move_walk import MODULES, NUM_KINDS, Walk, check_ends
from hypothesis import given
from hypothesis import strategies as st

Act = list[str] | tuple[object, ...]
"""Methods of `Walk` without arguments, or one with arguments."""

WORKERS = st.sampled_from(["host", "other"])
PIECES = st.lists(st.sampled_from(["copy", "step", "step"]), max_size=6)
ACTS = st.one_of(
    st.builds(lambda num: ["step"] * num, st.integers(1, 6)),
    st.tuples(st.just("arrive"), st.integers(0, NUM_KINDS - 1), st.booleans()),
    st.tuples(st.just("away"), st.sampled_from(MODULES), WORKERS, st.booleans()),
    st.tuples(st.just("home"), st.integers(0, 3)),
    PIECES,
    st.builds(lambda pieces: [*pieces, "switch", "step"], PIECES),
    st.builds(lambda pieces: [*pieces, "switch", "step"], PIECES),
    st.sampled_from([["cancel"], ["crowd", "step", "step"]]),
    st.tuples(st.just("break_"), WORKERS, st.integers(0, 30)),
    st.tuples(st.just("lose"), WORKERS),
    st.tuples(st.just("abort"), st.integers(0, 7)),
)


@st.composite
def journeys(draw: st.DrawFn) -> list[Act]:
    """Mostly there and back again, with other things in between."""
    acts: list[Act] = []
    for _ in range(draw(st.integers(1, 6))):
        away = draw(st.tuples(st.just("away"), st.sampled_from(MODULES), WORKERS, st.booleans()))
        acts += [away, draw(PIECES), *draw(st.lists(ACTS, max_size=2)), ["switch", "step"]]
        acts += draw(st.lists(ACTS, max_size=3))
        if draw(st.booleans()):
            acts += [("home", draw(st.integers(0, 3))), draw(PIECES), ["switch", "step"]]
    return acts


def run(walk: Walk, act: Act) -> None:
    if isinstance(act, list):
        for word in act:
            getattr(walk, word)()
        return
    name, *how = act
    getattr(walk, str(name))(*how)


@given(journeys())
def test_every_sequence_ends_in_its_tokens_or_is_told_why_not(acts: list[Act]) -> None:
    walk = Walk()
    for kind in range(NUM_KINDS):
        walk.arrive(kind, hand_over=kind == 2)
    for act in acts:
        run(walk, act)
    walk.end()
    check_ends(walk)
    for one in walk.mesh.home.placement.placed:
        walk.mesh.back(one.move_id)
    assert walk.mesh.home.load().num_blocks == 34
    assert walk.mesh.home.pool.num_bytes == 34 * walk.mesh.home.pool.layout.block_bytes
    walk.close_what_is_home()
    for host in walk.mesh.hosts.values():
        assert host.hosted.num_bytes == 0
        assert host.load().num_blocks == 400
