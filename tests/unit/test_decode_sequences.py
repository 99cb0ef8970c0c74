from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN

from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FailureReason
from libs.request.sampling import SamplingParams
from libs.worker.decode.sequences import HeldSequence, Sequences, Stage

LEASE = 10.0


def generation(
    request_id: str, *, gateway: str = "g", deadline: float = 100.0, num_output: int = 0
) -> Generation:
    return Generation(
        request_id=request_id,
        token_ids=pack_token_ids([1] * (5 + num_output)),
        num_prompt_tokens=5,
        sampling=SamplingParams(),
        gateway=gateway,
        deadline_unix_seconds=deadline,
    )


def awaiting(sequences: Sequences, request_id: str, now: float = 0.0, **how: object) -> HeldSequence:
    held = sequences.hold(generation(request_id, **how), "p0", INVALID_SPAN, now)  # type: ignore[arg-type]  # kwargs of the tests
    held.stage = Stage.AWAITING_KV
    return held


def ended(sequences: Sequences, now: float) -> list[tuple[str, FailureReason]]:
    return [(held.request_id, reason) for held, reason in sequences.expired(now)]


def test_what_hears_nothing_loses_its_lease_and_what_is_heard_keeps_it() -> None:
    sequences = Sequences(LEASE)
    awaiting(sequences, "silent")
    heard = awaiting(sequences, "heard")
    sequences.renew(heard, now=6.0)
    assert ended(sequences, 9.9) == []
    assert sequences.next_expiry() == 10.0
    assert ended(sequences, 10.0) == [("silent", FailureReason.LEASE_EXPIRED)]
    assert ended(sequences, 16.0)[1] == ("heard", FailureReason.LEASE_EXPIRED)


def test_a_running_sequence_has_a_deadline_and_no_lease() -> None:
    sequences = Sequences(LEASE)
    awaiting(sequences, "r").stage = Stage.RUNNING
    assert ended(sequences, 99.0) == []
    assert ended(sequences, 100.0) == [("r", FailureReason.DEADLINE)]


def test_a_deadline_before_the_end_of_the_lease_counts_and_is_named_as_such() -> None:
    sequences = Sequences(LEASE)
    awaiting(sequences, "r", deadline=4.0)
    assert sequences.next_expiry() == 4.0
    assert ended(sequences, 4.0) == [("r", FailureReason.DEADLINE)]


def test_one_that_the_engine_still_decides_about_is_left_to_it() -> None:
    sequences = Sequences(LEASE)
    sequences.hold(generation("r", deadline=1.0), "p0", INVALID_SPAN, 0.0)
    assert ended(sequences, 50.0) == []
    assert sequences.next_expiry() == float("inf")


def test_they_are_found_by_gateway_and_by_the_prefill_worker_they_wait_for() -> None:
    sequences = Sequences(LEASE)
    awaiting(sequences, "a", gateway="g1")
    awaiting(sequences, "b", gateway="g2").stage = Stage.RUNNING
    assert [held.request_id for held in sequences.of_gateway("g2")] == ["b"]
    assert [held.request_id for held in sequences.awaiting("p0")] == ["a"]
    assert sequences.awaiting("p1") == []
    assert (sequences.num_in(Stage.AWAITING_KV), len(sequences)) == (1, 2)


def test_the_first_index_of_a_replay_is_behind_what_was_delivered() -> None:
    sequences = Sequences(LEASE)
    assert awaiting(sequences, "first").first_index == 0
    assert sequences.hold(generation("again", num_output=3), "p0", INVALID_SPAN, 0.0).first_index == 3


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.booleans()), min_size=1, max_size=8))
def test_the_next_expiry_is_exactly_when_something_expires(times: list[tuple[float, float, bool]]) -> None:
    sequences = Sequences(LEASE)
    for number, (held_at, deadline, is_running) in enumerate(times):
        held = awaiting(sequences, str(number), held_at, deadline=deadline)
        held.stage = Stage.RUNNING if is_running else Stage.AWAITING_KV
    at = sequences.next_expiry()
    assert ended(sequences, at - 1e-6) == []
    assert ended(sequences, at)
