"""The pair for a request, held against a plain reading of the rules, and what each kind of room means."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.generation import Place
from libs.bus.messages.kv_events import Stored, Tier
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.fetch import FetchCost
from libs.cost.load import WorkerLoad
from libs.cost.prefill import PrefillCost
from libs.kv_events.view import KvView
from libs.routing.candidates import Draw
from libs.routing.policies import POLICIES
from libs.routing.predicting import HitKind
from services.router.choosing import Choosing, Match
from services.router.matching import Matching, Obstacle
from services.router.view import ClusterView

PREFILL, DECODE = ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER
NAMES = b"".join(bytes([n + 1]) * 16 for n in range(8))
DRAW = Draw(0, 0.0, 0.0)
MAX_WAITING_TOKENS = 1000
MEAN_CAP = 100
COST = PrefillCost(1e-3, 1e-3, 0.0)


@dataclass(frozen=True)
class Worker:
    kind: ServiceKind
    name: str
    state: ServiceState = ServiceState.READY
    fingerprint: str = "f"
    model: str = "m"
    runs_prompts: bool = False
    max_model_len: int = 0
    num_seats: int = 0
    load: WorkerLoad = field(default_factory=lambda: load_of())

    @property
    def presence(self) -> Presence:
        return Presence(
            kind=self.kind,
            name=self.name,
            incarnation=self.name,
            state=self.state,
            model=self.model,
            model_fingerprint=self.fingerprint,
            runs_prompts=self.runs_prompts,
            max_model_len=self.max_model_len,
            num_seats=self.num_seats,
            num_layers=4,
            block_bytes=1 << 10,
        )


def load_of(**figures: object) -> WorkerLoad:
    given_or_usual = {"num_blocks": 40, "block_size": 16, "prefill_cost": COST, **figures}
    return WorkerLoad(**given_or_usual)  # type: ignore[arg-type]  # kwargs of the tests


def place_of(num_tokens: int = 130, **more: object) -> Place:
    facts = {"request_id": "r", "num_tokens": num_tokens, "deadline_unix_seconds": 99.0, **more}
    return Place(**{"max_new_tokens": 64, **facts})  # type: ignore[arg-type]  # kwargs of the tests


@dataclass
class Cluster:
    workers: list[Worker]
    policy: str = "predicted_ttft"
    sticky_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.view = ClusterView(stale_after_seconds=3, placement_seconds=5, max_placements=100)
        self.held = KvView(1000)
        self.view.set_members(worker.presence for worker in self.workers)
        for worker in self.workers:
            report = LoadReport(kind=worker.kind, incarnation=worker.name, sequence=1, load=worker.load)
            self.view.hear(report, 0.0)

    def match(self, place: Place, draw: Draw = DRAW) -> Match | Obstacle:
        choosing = Choosing(POLICIES[self.policy], self.sticky_seconds)
        matching = Matching(choosing, MAX_WAITING_TOKENS, MEAN_CAP)
        return matching.match(place, 1.0, self.view, self.held, draw, 0.5)

    def pair(self, place: Place, draw: Draw = DRAW) -> tuple[str, str]:
        match = self.match(place, draw)
        assert isinstance(match, Match), match
        return match.placed.prefill, match.placed.decode


LOADS = st.builds(
    load_of,
    num_blocks=st.sampled_from([5, 40]),
    num_used_blocks=st.integers(0, 40),
    num_running=st.integers(0, 4),
    num_waiting=st.integers(0, 2),
    num_waiting_tokens=st.sampled_from([0, 999, 1000]),
    queued_seconds=st.floats(0, 3),
    mean_output_tokens=st.sampled_from([0.0, 50.0, 500.0]),
)
WORKERS = st.lists(
    st.builds(
        Worker,
        kind=st.sampled_from([PREFILL, DECODE]),
        name=st.sampled_from("abcdefgh"),
        state=st.sampled_from([ServiceState.READY, ServiceState.READY, ServiceState.DRAINING]),
        fingerprint=st.sampled_from(["f", "f", "g"]),
        model=st.sampled_from(["m", "m", "n"]),
        runs_prompts=st.booleans(),
        max_model_len=st.sampled_from([0, 100]),
        num_seats=st.sampled_from([0, 3]),
        load=LOADS,
    ),
    max_size=8,
    unique_by=lambda worker: worker.name,
)
PLACES = st.builds(
    place_of,
    num_tokens=st.sampled_from([20, 90, 130, 900]),
    max_new_tokens=st.sampled_from([1, 64]),
    model=st.sampled_from(["", "m"]),
    exclude=st.lists(st.sampled_from("abcd"), max_size=2).map(tuple),
    names=st.sampled_from([b"", NAMES]),
    session=st.sampled_from(["", "s"]),
)


class Reading:
    """The rules once more, one worker at a time."""

    def __init__(self, workers: list[Worker], place: Place) -> None:
        self.place = place
        self.usable = [
            w
            for w in workers
            if w.state is ServiceState.READY
            and (not place.model or w.model == place.model)
            and w.name not in place.exclude  # none of them was heard after the request came
        ]

    def fits(self, worker: Worker) -> bool:
        in_context = not worker.max_model_len or self.place.num_tokens < worker.max_model_len
        return in_context and self.place.num_tokens // 16 + 1 <= worker.load.num_blocks

    def has_seat(self, worker: Worker) -> bool:
        return not worker.num_seats or worker.load.num_running + worker.load.num_waiting < worker.num_seats

    def has_room(self, worker: Worker) -> bool:
        mean = min(worker.load.mean_output_tokens, MEAN_CAP)
        expected = int(min(mean, self.place.max_new_tokens))
        needed = min((self.place.num_tokens + expected) // 16 + 1, worker.load.num_blocks)
        growth = worker.load.num_running * max(int(mean) // 16 // 2, 1)
        growth += worker.load.num_waiting * max(int(mean) // 16, 1)
        free = worker.load.num_blocks - worker.load.num_used_blocks - growth
        return self.fits(worker) and self.has_seat(worker) and needed <= free

    def may_run(self, worker: Worker) -> bool:
        queue = worker.load.num_waiting_tokens
        return self.fits(worker) and self.has_seat(worker) and queue < MAX_WAITING_TOKENS

    def pairs(self, usable: list[Worker]) -> set[tuple[Worker, Worker]]:
        pairs: set[tuple[Worker, Worker]] = set()
        for decode in (w for w in usable if w.kind is DECODE):
            prefills = {w for w in usable if w.kind is PREFILL and w.fingerprint == decode.fingerprint}
            runners = prefills or ({decode} if decode.runs_prompts else set())
            pairs |= {(runner, decode) for runner in runners}
        return pairs

    def expected(self) -> Obstacle | set[tuple[str, str]]:
        if not self.pairs(self.usable):
            return Obstacle.NO_PAIR
        pairs = self.pairs([worker for worker in self.usable if self.fits(worker)])
        if not pairs:
            return Obstacle.TOO_LONG
        roomy = {(r, d) for r, d in pairs if self.may_run(r) and self.has_room(d)}
        if not roomy:
            return Obstacle.NO_ROOM
        return {("" if runner is decode else runner.name, decode.name) for runner, decode in roomy}


@given(
    WORKERS,
    PLACES,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0.0, 1.0]),
    st.builds(Draw, st.integers(0, 99), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
)
def test_whatever_the_cluster_the_pair_is_one_the_rules_allow_or_the_obstacle_is_true(
    workers: list[Worker], place: Place, policy: str, sticky_seconds: float, draw: Draw
) -> None:
    cluster = Cluster(workers, policy, sticky_seconds)
    for worker in workers:
        cluster.held.apply(
            worker.name, Stored(Tier.DEVICE, NAMES[: 16 * (len(worker.load.recent_request_ids) + 2)])
        )
    match = cluster.match(place, draw)
    expected = Reading(workers, place).expected()
    if isinstance(match, Obstacle):
        assert match is expected
    else:
        assert isinstance(expected, set)
        assert (match.placed.prefill, match.placed.decode) in expected
        assert set(match.shares) == {match.placed.prefill or match.placed.decode, match.placed.decode}
        assert match.ttft_seconds > 0


def pools(*, prefill: WorkerLoad | None = None, decode: WorkerLoad | None = None) -> list[Worker]:
    return [
        Worker(PREFILL, "p0", load=prefill or load_of()),
        Worker(DECODE, "d0", load=decode or load_of()),
    ]


def test_a_prompt_that_fits_no_prefill_pool_is_too_long_unless_another_is_larger() -> None:
    workers = pools(prefill=load_of(num_blocks=8))
    assert Cluster(workers).match(place_of(130)) is Obstacle.TOO_LONG
    larger = [*workers, Worker(PREFILL, "p1")]
    assert Cluster(larger).pair(place_of(130)) == ("p1", "d0")


def test_a_prompt_that_no_prefill_pool_holds_is_run_by_a_decode_worker_that_can() -> None:
    workers = [Worker(PREFILL, "p0", load=load_of(num_blocks=8)), Worker(DECODE, "d0", runs_prompts=True)]
    assert Cluster(workers).pair(place_of(130)) == ("", "d0")
    assert Cluster(workers).pair(place_of(100)) == ("p0", "d0")


def test_a_worker_without_a_seat_is_left_alone_until_one_is_free() -> None:
    full = load_of(num_running=2, num_waiting=1)
    for kind, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
        workers = [Worker(kind, "full", num_seats=3, load=full), Worker(other, "other")]
        assert Cluster(workers).match(place_of()) is Obstacle.NO_ROOM
        workers[0] = Worker(kind, "full", num_seats=4, load=full)
        assert isinstance(Cluster(workers).match(place_of()), Match)


def test_seats_of_placements_on_their_way_are_taken() -> None:
    cluster = Cluster([Worker(PREFILL, "p0", num_seats=1), Worker(DECODE, "d0")])
    match = cluster.match(place_of())
    assert isinstance(match, Match)
    cluster.view.place("r", match.shares, 0.5)
    assert cluster.match(place_of()) is Obstacle.NO_ROOM
    cluster.view.withdraw("r")
    assert isinstance(cluster.match(place_of()), Match)


def test_room_is_for_the_prompt_and_the_answer_to_be_expected_of_it() -> None:
    cluster = Cluster(pools(decode=load_of(num_used_blocks=30, mean_output_tokens=64.0)))
    assert cluster.match(place_of(130, max_new_tokens=64)) is Obstacle.NO_ROOM
    assert cluster.pair(place_of(130, max_new_tokens=8)) == ("p0", "d0")
    unknown = Cluster(pools(decode=load_of(num_used_blocks=30)))
    assert unknown.pair(place_of(130, max_new_tokens=64)) == ("p0", "d0")


def test_an_answer_longer_than_the_pool_does_not_keep_a_prompt_out_that_fits() -> None:
    cluster = Cluster(pools(decode=load_of(mean_output_tokens=90.0)))
    assert cluster.pair(place_of(39 * 16, max_new_tokens=90)) == ("p0", "d0")


def test_decode_goes_to_the_pool_that_will_be_the_least_full() -> None:
    workers = [
        Worker(PREFILL, "p0"),
        Worker(DECODE, "d0", load=load_of(num_used_blocks=10)),
        Worker(DECODE, "d1", load=load_of(num_used_blocks=5, num_running=6, mean_output_tokens=64.0)),
        Worker(DECODE, "d2", load=load_of(num_used_blocks=11)),
    ]
    assert Cluster(workers).pair(place_of())[1] == "d0"


def test_an_idle_worker_that_has_the_prefix_is_chosen_and_a_busy_one_is_not() -> None:
    for queued, expected in ((0.0, ("p1", HitKind.LOCAL)), (9.0, ("p0", HitKind.RECOMPUTE))):
        workers = [
            Worker(PREFILL, "p0"),
            Worker(PREFILL, "p1", load=load_of(queued_seconds=queued)),
            Worker(DECODE, "d0"),
        ]
        cluster = Cluster(workers)
        cluster.held.apply("p1", Stored(Tier.DEVICE, NAMES))
        match = cluster.match(place_of(130, names=NAMES))
        assert isinstance(match, Match)
        assert (match.placed.prefill, match.kind) == expected


def test_what_a_store_has_makes_the_least_loaded_as_good_as_the_one_that_has_it_itself() -> None:
    workers = [
        Worker(PREFILL, "p0", load=load_of(fetch_cost=FetchCost(1e-4, 1e9))),
        Worker(PREFILL, "p1", load=load_of(queued_seconds=0.2)),
        Worker(DECODE, "d0"),
    ]
    cluster = Cluster(workers)
    cluster.held.apply("p1", Stored(Tier.DEVICE, NAMES))
    cluster.held.apply("s0", Stored(Tier.DRAM, NAMES))
    match = cluster.match(place_of(130, names=NAMES))
    assert isinstance(match, Match)
    assert (match.placed.prefill, match.kind) == ("p0", HitKind.STORE)
    assert match.ttft_seconds < 0.2


def test_what_a_departed_holder_had_is_nobodys() -> None:
    cluster = Cluster(pools())
    cluster.held.apply("p0", Stored(Tier.DEVICE, NAMES))
    cluster.held.forget("p0")
    match = cluster.match(place_of(130, names=NAMES))
    assert isinstance(match, Match)
    assert match.kind is HitKind.RECOMPUTE


def test_names_that_are_no_whole_names_are_passed_over() -> None:
    cluster = Cluster(pools())
    assert cluster.pair(place_of(130, names=NAMES[:19])) == ("p0", "d0")


def test_decode_workers_that_run_prompts_are_chosen_by_the_policy() -> None:
    workers = [
        Worker(DECODE, "d0", runs_prompts=True, load=load_of(queued_seconds=2.0)),
        Worker(DECODE, "d1", runs_prompts=True, load=load_of(queued_seconds=1.0, num_used_blocks=20)),
    ]
    match = Cluster(workers).match(place_of())
    assert isinstance(match, Match)
    assert (match.placed.prefill, match.placed.decode) == ("", "d1")
    assert match.shares["d1"].num_tokens == 130
    assert match.shares["d1"].num_blocks == 9


def test_a_session_stays_where_it_is_while_that_is_not_much_slower() -> None:
    workers = [*(Worker(PREFILL, f"p{n}") for n in range(4)), *(Worker(DECODE, f"d{n}") for n in range(4))]
    draws = [Draw(n, n / 10, n / 10) for n in range(10)]
    sticky = Cluster(workers, sticky_seconds=1.0)
    pairs = {sticky.pair(place_of(session="s"), draw) for draw in draws}
    assert len(pairs) == 1
    assert len({Cluster(workers).pair(place_of(session="s"), draw) for draw in draws}) > 1
    home = next(iter(pairs))[0]
    busy = [
        Worker(PREFILL, w.name, load=load_of(queued_seconds=1.5)) if w.name == home else w for w in workers
    ]
    assert Cluster(busy, sticky_seconds=1.0).pair(place_of(session="s"))[0] != home
