"""Moves as they are typed, placements and rounds as they are read in a terminal."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_coordinator import candidate, done, record, seen
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.migration import Rounds
from libs.placement.migration import MigrationPhase
from services.cli.__main__ import main
from services.cli.admin_key import find_admin_key
from services.cli.arguments import BadCommand, move_asked, new_parser
from services.cli.explain import as_one, shape_of, show_explanation
from services.cli.gateway import GatewayError
from services.cli.migrate import follow_move, progress_words, start_move
from services.cli.placement import Letters, show_placement
from services.gateway.mesh.placement_view import move_document


def asked(*words: str) -> dict[str, Any]:
    return move_asked(new_parser().parse_args(["migrate", *words]))


def test_only_what_was_typed_is_asked() -> None:
    assert asked("d", "--to", "p", "--layers", "0:3") == {"instance": "d", "host": "p", "layers": [0, 3]}
    assert asked("d", "--return", "m") == {"instance": "d", "return_of": "m"}
    assert asked("--return", "m") == {"return_of": "m"}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("d",),
        ("d", "--to", "p"),
        ("d", "--layers", "0:3"),
        ("d", "--to", "p", "--tokens", "--heads", "1"),
        ("d", "--to", "p", "--return", "m"),
        ("d", "--return", "m", "--tokens"),
        ("--return", "m", "--to", "p"),
    ],
)
def test_words_that_make_no_move_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(BadCommand):
        asked(*words)


@pytest.mark.parametrize(
    "flags",
    [
        ("--layers", "3"), ("--layers", "3:3"), ("--layers", "a:b"), ("--layers", "-1:3"),
        ("--heads", "1,,2"), ("--heads", ""), ("--heads", "x"),
        ("--blocks", "0"), ("--blocks", "many"), ("--kind", "copy"), ("--list", "--cancel", "m"),
    ],
)  # fmt: skip
def test_values_that_are_none_end_the_command(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        asked("d", "--to", "p", *flags)
    said = capsys.readouterr().err
    assert flags[0] in said
    assert "invalid _" not in said, "functions have no names for people"


@pytest.mark.parametrize("alone", [("--list",), ("--cancel", "m")], ids=" ".join)
@pytest.mark.parametrize(
    "words",
    [("d",), ("--to", "p"), ("--layers", "0:3"), ("--tokens",), ("--expected-epoch", "0")],
    ids=" ".join,
)
def test_what_concerns_no_module_is_refused_beside_one(
    alone: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", *words, *alone, "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith(f"kvmesh: {alone[0]}")


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://127.0.0.1:8000", "kept"),
        ("http://localhost", "kept"),
        ("http://[::1]:8000/", "kept"),
        ("http://example.org:8000", ""),
        ("http://127.0.0.1.example.org", ""),
        ("http://127.0.0.1@example.org", ""),
        ("nonsense", ""),
        ("http://[::1", ""),
    ],
)
def test_the_kept_key_is_for_this_machine_alone(tmp_path: Path, url: str, key: str) -> None:
    (tmp_path / "admin.key").write_text("kept\n")
    assert find_admin_key("", url, {"KVMESH_STATE_DIR": str(tmp_path)}) == key


def test_a_key_that_is_given_goes_before_the_variable_and_that_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "kvmesh").mkdir()
    (tmp_path / "kvmesh" / "admin.key").write_text("kept\n")
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    url = "http://127.0.0.1"
    assert find_admin_key("", url, environ) == "kept"
    assert find_admin_key("", "http://far", {**environ, "KVMESH_ADMIN_KEY": "told"}) == "told"
    assert find_admin_key("given", url, {**environ, "KVMESH_ADMIN_KEY": "told"}) == "given"
    assert find_admin_key("", url, {"XDG_STATE_HOME": str(tmp_path / "none")}) == ""


def test_letters_are_in_the_order_in_which_people_count() -> None:
    letters = Letters(["decode-10", "prefill-0", "decode-2", "decode-2"])
    assert [(name, letters.letter(name)) for name in letters.names()] == [
        ("decode-2", "A"),
        ("decode-10", "B"),
        ("prefill-0", "C"),
    ]


@given(st.lists(st.from_regex(r"[a-z]*-?[0-9]{0,3}", fullmatch=True)))
def test_each_worker_has_a_letter_of_its_own_as_long_as_there_are_letters(names: list[str]) -> None:
    letters = Letters(names)
    given_out = [letters.letter(name) for name in letters.names()]
    assert sorted(letters.names()) == sorted(set(names))
    assert len(set(given_out)) == min(52, len(set(names)))
    assert all(letters.colour(name) for name in names)


CAPACITY = {
    "num_blocks": 0, "num_used_blocks": 0, "num_tokens": 0, "kv_memory_bytes": 0, "num_own_bytes": 0,
    "num_hosted_bytes": 0,
}  # fmt: skip


def instance(num_layers: int = 4, num_kv_heads: int = 3, **facts: Any) -> dict[str, Any]:
    return {
        "name": "decode-0", "incarnation": "d", "state": "ready", "epoch": 2, "num_layers": num_layers,
        "num_kv_heads": num_kv_heads, "layers": [{"first": 0, "end": num_layers, "worker": "decode-0"}],
        "heads": [], "lent": [], "hosted": [],
        "capacity": CAPACITY,
        **facts,
    }  # fmt: skip


def picture(*instances: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    show_placement({"instances": list(instances)}, as_json=False, out=out)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_layers_and_heads_have_the_letters_of_who_has_them() -> None:
    layers = [
        {"first": 0, "end": 3, "worker": "decode-0"},
        {"first": 3, "end": 4, "worker": "b", "move_id": "m1", "has_weights_at_home": False},
    ]
    heads = [{"first": 0, "end": 2, "kv_heads": [1], "worker": "a", "what": "KV head 1 of layers 0-1",
              "move_id": "m2", "num_blocks": 0}]  # fmt: skip
    lines = picture(instance(layers=layers, heads=heads))
    assert lines[0] == "A a   B b   C decode-0"
    assert [line.split()[-1] for line in lines if line.startswith("head")] == ["CCCB", "AACB", "CCCB"]
    assert "layer 3 at b, with its weights (move m1)" in lines[-3]
    assert "KV head 1 of layers 0-1 at a (move m2)" in lines[-2]
    assert lines[-1].strip() == "capacity not told yet"


def test_blocks_that_are_lent_and_workers_that_drain_are_told() -> None:
    lent = [{"worker": "b", "what": "lent blocks", "num_blocks": 70, "move_id": "m3"}]
    guest = {"what": "lent blocks", "instance": "c", "num_blocks": 9, "num_bytes": 1 << 20, "move_id": "m4"}
    said = "\n".join(picture(instance(lent=lent, state="draining", hosted=[guest])))
    assert "lends 9 blocks to c, 1.0 MiB" in said
    assert "lent blocks at b: 70 (move m3)" in said
    assert "draining" in said


def test_a_hosts_own_bytes_and_those_for_others_are_told_apart() -> None:
    facts = {"num_blocks": 1071, "num_used_blocks": 0, "num_tokens": 17136, "kv_memory_bytes": 1 << 30}
    capacity = CAPACITY | facts | {"num_own_bytes": 376 << 20, "num_hosted_bytes": 648 << 20}
    last = picture(instance(capacity=capacity))[-1].strip()
    assert last == "1071 KV blocks, 17136 tokens in 376.0 MiB; 0% in use; 648.0 MiB more for others"


def test_a_model_of_many_layers_is_drawn_in_several_rows_that_fit() -> None:
    lines = picture(instance(num_layers=126, num_kv_heads=8))
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.startswith("heads 0-7")]
    assert [len(row.split()[-1]) for row in rows] == [80, 46]
    assert any(line.split()[:2] == ["80", "90"] for line in lines)


def test_without_workers_it_is_said_so() -> None:
    assert picture() == ["No worker has told its placement yet."]


def explained(*rounds: Any, is_automatic: bool = True) -> str:
    told = Rounds(leader="coordinator-0", is_automatic=is_automatic, rounds=rounds)
    out = io.StringIO()
    show_explanation(msgspec.to_builtins(told), as_json=False, out=out)
    return out.getvalue()


def test_a_round_tells_what_it_saw_considered_and_did() -> None:
    refused = candidate("its link is too slow", what="layers 20-29")
    said = explained(
        seen(3, candidates=(refused, candidate()), decision="moved KV heads 1", move_id="m1")
    ).splitlines()
    assert said[0] == "coordinator-0 leads; it moves modules by itself"
    assert [line.split() for line in said[4:6]] == [
        ["decode-0", "decode", "90%", "80%", "50%", "0.80"],
        ["prefill-0", "prefill", "10%", "20%", "0%", "0.10"],
    ]
    assert said[6:] == [
        "  - decode-0: layers 20-29 to prefill-0",
        "      benefit 0.310, cost 0.050, takes 0.40 s, adds 2.10 ms to a step",
        "      its link is too slow",
        "  + decode-0: KV heads 1 of layers 0-29 to prefill-0",
        "      benefit 0.310, cost 0.050, takes 0.40 s, adds 2.10 ms to a step",
        "      taken",
        "  => moved KV heads 1 (move m1)",
    ]


def test_candidates_that_are_refused_alike_are_told_as_one() -> None:
    refused = [
        candidate(f"would lower the peak by 0.0{n} only", what=what, host=host, benefit=n / 10)
        for n, (what, host) in enumerate(
            itertools.product(("layer 0", "layers 0-1"), ("prefill-0-i", "prefill-1"))
        )
    ]
    other = candidate("the last decode worker stays one", what="flip to prefill", host="")
    said = explained(seen(3, candidates=(*refused, other))).splitlines()
    assert said[6:-1] == [
        "  - decode-0: layer 0; layers 0-1 to prefill-0, prefill-1",
        "      benefit 0.000 to 0.300, cost 0.050, takes 0.40 s, adds 2.10 ms to a step",
        "      would lower the peak by 0.00 to 0.03 only",
        "  - decode-0: flip to prefill",
        "      benefit 0.310, cost 0.050, takes 0.40 s, adds 2.10 ms to a step",
        "      the last decode worker stays one",
    ]


@given(st.lists(st.floats(-9, 9).map(lambda x: f"{x:.2f}"), min_size=1, max_size=5))
def test_a_figure_in_which_lines_differ_becomes_its_range(figures: list[str]) -> None:
    lines = [f"decode-0 (layers 20-29): cost {figure}, {figure} s" for figure in figures]
    assert {shape_of(line) for line in lines} == {"decode-0 (layers 20-29): cost #, # s"}
    numbers = sorted(map(float, figures))
    told = as_one(lines).removeprefix("decode-0 (layers 20-29): cost ").split(",")[0].split(" to ")
    assert [float(told[0]), float(told[-1])] == [numbers[0], numbers[-1]]
    assert len(told) == (1 if numbers[0] == numbers[-1] else 2)


@pytest.mark.parametrize("word", ["decode-0", "20-29", "0.25-0.3", "1.5x", "v1.2.3", "3s", "1.5.", "2, 3"])
def test_a_number_within_a_word_is_no_figure(word: str) -> None:
    shape = {"1.5.": "#.", "2, 3": "#, #"}.get(word, word)
    assert shape_of(f"cost {word}") == f"cost {shape}"


def test_quiet_rounds_are_told_together_unless_their_reason_changes() -> None:
    quiet = [seen(n, decision=f"stays: gap 0.{n} is below 0.1") for n in (5, 4, 3)]
    said = explained(seen(6, decision="stays: cooling down"), *quiet, seen(2, move_id="m"))
    heads = [line.split("  ")[0] for line in said.splitlines() if line.startswith("round")]
    assert heads == ["round 2", "rounds 3-5", "round 6"]


def test_a_loop_that_only_watches_and_one_without_rounds_say_so() -> None:
    said = explained(is_automatic=False)
    assert "only watches" in said
    assert "There was no round yet." in said


@given(st.text(), st.lists(st.text(max_size=300), max_size=3))
def test_whatever_is_said_fits_into_eighty_columns(decision: str, verdicts: list[str]) -> None:
    words = [" ".join(text.split()) for text in (decision, *verdicts)]
    rounds = seen(1, decision=words[0], candidates=tuple(candidate(verdict) for verdict in words[1:]))
    assert all(len(line) <= 80 for line in explained(rounds).splitlines())


class Course:
    """The records that a gateway gives one after the other."""

    def __init__(self, *moves: Any) -> None:
        self._documents: Iterator[dict[str, Any]] = (move_document(move, {}) for move in moves)

    def migration(self, move_id: str) -> dict[str, Any]:
        del move_id
        return next(self._documents)


def test_a_move_is_followed_through_its_phases_each_told_once() -> None:
    pauses: list[float] = []
    out = io.StringIO()
    reserved = {"reserving": 0.02}
    course = Course(
        record(MigrationPhase.PLANNED),
        record(MigrationPhase.COPYING, phase_seconds=reserved),
        record(MigrationPhase.COPYING, phase_seconds=reserved, num_kv_bytes=1 << 20),
        record(MigrationPhase.ROLLING_BACK, phase_seconds={**reserved, "copying": 1.5}),
        record(
            MigrationPhase.FAILED,
            phase_seconds={**reserved, "copying": 1.5, "rolling_back": 0.1},
            error="lost",
        ),
    )
    last = follow_move(course, "m1", out=out, pause=pauses.append)  # type: ignore[arg-type]  # it asks for moves alone
    assert last["error"] == "lost"
    assert len(pauses) == 4
    assert [line.split("  ")[1] for line in out.getvalue().splitlines()[1:]] == [
        "reserving",
        "copying",
        "rolling back",
    ]


def test_how_far_a_move_is_is_told_as_soon_as_it_is_known() -> None:
    def words(**facts: int) -> str:
        return progress_words(move_document(record(**facts), {}))

    assert words() == ""
    assert words(num_kv_bytes=1 << 20) == "KV 1.0 MiB"
    assert words(num_kv_bytes=1 << 20, num_total_bytes=4 << 20) == "25% of 4.0 MiB: KV 1.0 MiB"
    assert (
        words(num_total_bytes=8 << 20, num_weight_bytes=2 << 20)
        == "25% of 8.0 MiB: KV 0.0 MiB, weights 2.0 MiB"
    )
    assert words(num_kv_bytes=5 << 20, num_total_bytes=4 << 20).startswith("100% of")


def test_a_move_home_is_told_as_such() -> None:
    out = io.StringIO()
    back = done(is_return=True, instance_name="decode-0", host_name="prefill-0", num_blocks_before=None)
    follow_move(Course(back), "m1", out=out)  # type: ignore[arg-type]  # it asks for moves alone
    assert out.getvalue().startswith("move m1: layers 20-29 of decode-0 home from prefill-0\n")
    assert "its KV blocks are not known" in out.getvalue()


def test_who_stops_waiting_is_told_that_the_move_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(Course):
        def start_migration(self, asked: dict[str, Any]) -> dict[str, Any]:
            return {"id": "m1", "epoch": len(asked)}

        def migration(self, move_id: str) -> dict[str, Any]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_move(Interrupted(), {}, waits=True, as_json=False, out=io.StringIO())  # type: ignore[arg-type]  # a part
    said = capsys.readouterr().err
    assert said.startswith("move m1 goes on without this command: ")
    assert "kvmesh migrate --cancel m1 rolls it back until it has switched" in said
    assert said.count("\n") == 1


def test_who_stops_before_the_answer_is_told_that_the_move_may_have_begun(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Interrupted(Course):
        def start_migration(self, asked: dict[str, Any]) -> dict[str, Any]:
            raise KeyboardInterrupt

    for waits in (False, True):
        with pytest.raises(KeyboardInterrupt):
            start_move(Interrupted(), {}, waits=waits, as_json=False, out=io.StringIO())  # type: ignore[arg-type]  # a part
        assert capsys.readouterr().err == "the move may have begun; kvmesh migrate --list tells\n"


def test_a_gateway_that_is_lost_while_waiting_does_not_end_the_move() -> None:
    class Lost(Course):
        def start_migration(self, asked: dict[str, Any]) -> dict[str, Any]:
            return {"id": "m1", "epoch": len(asked)}

        def migration(self, move_id: str) -> dict[str, Any]:
            raise GatewayError("no gateway")

    with pytest.raises(GatewayError, match=r"^no gateway; move m1 goes on without this command"):
        start_move(Lost(), {}, waits=True, as_json=False, out=io.StringIO())  # type: ignore[arg-type]  # a part
