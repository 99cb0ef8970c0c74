"""Who is there, as heard: against a model that remembers everything."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.runtime.identity import new_identity
from libs.runtime.roster import EXPIRY_SECONDS, Roster, RosterChange


def presence(incarnation: str, state: ServiceState = ServiceState.READY, detail: str = "") -> Presence:
    kind = ServiceKind.DECODE_WORKER if incarnation < "c" else ServiceKind.ROUTER
    return Presence(
        kind=kind, name=f"name-{incarnation}", incarnation=incarnation, state=state, detail=detail
    )


EVENT = st.one_of(
    st.tuples(st.just("seen"), st.sampled_from("abcd"), st.sampled_from(list(ServiceState))),
    st.tuples(st.just("deleted"), st.sampled_from("abcd"), st.none()),
    st.tuples(st.just("wait"), st.floats(0, 4), st.none()),
    st.tuples(st.just("reset"), st.none(), st.none()),
)


@given(st.lists(EVENT, max_size=60))
def test_the_roster_holds_whoever_was_heard_lately_and_tells_each_change_once(
    events: list[tuple[str, object, object]],
) -> None:
    roster, now = Roster(), 0.0
    heard: dict[str, float] = {}
    told: dict[str, Presence] = {}

    def apply(change: RosterChange) -> None:
        """A listener that only follows changes knows as much as the roster."""
        for p in change.arrived:
            assert p.incarnation not in told
            told[p.incarnation] = p
        for p in change.updated:
            assert told[p.incarnation] != p
            told[p.incarnation] = p
        for p in change.departed:
            del told[p.incarnation]

    for kind, subject, state in events:
        if kind == "seen" and isinstance(state, ServiceState):
            heard[str(subject)] = now
            apply(roster.seen(presence(str(subject), state), now))
        elif kind == "deleted":
            heard.pop(str(subject), None)
            apply(roster.deleted(str(subject)))
        elif kind == "reset":
            heard = dict.fromkeys(heard, now)
            roster.reset_timeouts(now)
            assert roster.timeouts_reset_at == now
        else:
            now += float(str(subject))
        assert roster.silence_seconds(now) == now - max(heard.values(), default=now)
        apply(roster.expire(now))
        heard = {i: t for i, t in heard.items() if now - t < EXPIRY_SECONDS}
        assert {p.incarnation for p in roster.all()} == set(heard)
        assert {p.incarnation: p for p in roster.all()} == told
        expiry = roster.next_expiry()
        assert expiry == (min(heard.values()) + EXPIRY_SECONDS if heard else None)
        for service_kind in ServiceKind:
            ready = [p for p in told.values() if p.kind is service_kind and p.state is ServiceState.READY]
            assert roster.ready(service_kind) == [p for p in roster.all() if p in ready]


def test_a_heartbeat_that_says_nothing_new_is_no_change() -> None:
    roster = Roster()
    assert roster.seen(presence("a"), 0.0).arrived == (presence("a"),)
    assert not roster.seen(presence("a"), 1.0)
    assert roster.seen(presence("a", detail="busy"), 2.0).updated == (presence("a", detail="busy"),)


def test_a_restarted_process_is_another_one() -> None:
    roster = Roster()
    roster.seen(presence("a"), 0.0)
    again = msgspec.structs.replace(presence("b"), name="name-a")
    assert roster.seen(again, 1.0) == RosterChange(arrived=(again,))
    assert roster.expire(EXPIRY_SECONDS).departed == (presence("a"),)
    assert roster.get("b") == again


def test_each_identity_is_new_and_a_name_stays() -> None:
    first, second = (new_identity(ServiceKind.ROUTER, "router-0") for _ in range(2))
    assert first.name == second.name == "router-0"
    assert first.incarnation != second.incarnation
    assert len(bytes.fromhex(first.incarnation)) == 8


def test_without_a_name_kind_and_host_make_one() -> None:
    assert new_identity(ServiceKind.DECODE_WORKER).name.startswith("decode-worker-")
