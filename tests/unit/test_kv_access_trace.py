"""Traces: Mooncake's fields, read back whole, joined by request, rotated within their size."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.kv.access_trace import (
    TraceLine,
    TraceUnreadable,
    encode_line,
    hash_ids,
    read_lines,
    read_requests,
    rotated_files,
)
from libs.kv.runs import RUN_BLOCKS, runs_of
from services.kv_store import trace_file
from services.kv_store.trace_file import NUM_FILES, TraceFile

IDS = st.lists(st.integers(0, 2**48 - 1), max_size=4).map(tuple)


@given(
    st.builds(
        TraceLine,
        timestamp=st.floats(0, 1e13),
        input_length=st.integers(0, 10**6),
        output_length=st.integers(0, 10**6),
        hash_ids=IDS,
        kind=st.sampled_from(["lookup", "put"]),
        num_memory_hits=st.integers(0, 9),
        tenant=st.text(max_size=3),
        request_id=st.text(max_size=3),
    )
)
def test_a_line_is_read_back_as_it_was_and_has_mooncakes_fields(line: TraceLine) -> None:
    encoded = encode_line(line)
    assert msgspec.json.decode(encoded, type=TraceLine) == line
    assert encoded.endswith(b"\n")
    assert {"timestamp", "input_length", "output_length", "hash_ids"} <= set(json.loads(encoded))
    assert all(each == int(float(each)) for each in json.loads(encoded)["hash_ids"])


def write(path: Path, *lines: TraceLine) -> Path:
    path.write_bytes(b"".join(map(encode_line, lines)))
    return path


def test_mooncakes_own_lines_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
        '{"timestamp": 27000, "input_length": 12, "output_length": 3, "hash_ids": []}\n'
    )
    requests = read_requests([path])
    assert [(r.timestamp, r.input_length, r.output_length, r.hash_ids) for r in requests] == [
        (0.0, 12, 3, ()),
        (482.0, 6955, 52, (46, 47, 48)),
    ]


def test_the_lookups_of_a_request_at_two_stores_are_one_request(tmp_path: Path) -> None:
    one = write(
        tmp_path / "one",
        TraceLine(timestamp=100.0, input_length=70, hash_ids=(1, 2), request_id="a", tenant="t"),
        TraceLine(timestamp=180.0, output_length=9, hash_ids=(1, 2), kind="put", request_id="a"),
        TraceLine(timestamp=190.0, output_length=5, hash_ids=(8,), kind="put", request_id="never looked up"),
    )
    other = write(
        tmp_path / "other",
        TraceLine(timestamp=101.0, input_length=70, hash_ids=(3, 4), request_id="a", tenant="t"),
        TraceLine(timestamp=150.0, input_length=20, hash_ids=(1,), request_id="b"),
    )
    first, second = read_requests([one, other])
    assert (first.hash_ids, first.output_length, first.tenant) == ((1, 2, 3, 4), 9, "t")
    assert (second.timestamp, second.hash_ids, second.output_length) == (50.0, (1,), 0)


@given(st.data())
def test_blocks_of_several_stores_are_joined_in_the_order_of_the_prompt(data: st.DataObject) -> None:
    runs = runs_of(data.draw(st.integers(1, 6 * RUN_BLOCKS)))
    lines: list[TraceLine] = []
    for store in "abc":
        own = [run for run in runs if data.draw(st.sampled_from("abc")) == store or store == "a"]
        lines.append(
            TraceLine(
                timestamp=1.0,
                hash_ids=tuple(1000 - n for run in own for n in run),
                run_starts=tuple(run.start for run in own),
                run_lengths=tuple(map(len, own)),
                request_id="r",
            )
        )
    with TemporaryDirectory() as folder:
        (request,) = read_requests([write(Path(folder) / "trace", *data.draw(st.permutations(lines)))])
    assert request.hash_ids == tuple(1000 - n for run in runs for n in run)


def test_where_one_lookup_does_not_tell_its_positions_blocks_stay_in_the_order_of_the_files(
    tmp_path: Path,
) -> None:
    told = TraceLine(timestamp=1.0, hash_ids=(5, 6), run_starts=(32,), run_lengths=(2,), request_id="r")
    untold = TraceLine(timestamp=2.0, hash_ids=(1, 2), request_id="r")
    (request,) = read_requests([write(tmp_path / "one", told), write(tmp_path / "other", untold)])
    assert request.hash_ids == (5, 6, 1, 2)


def test_a_line_cut_by_a_crash_is_passed_over_and_nonsense_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", TraceLine(timestamp=1.0), TraceLine(timestamp=2.0))
    path.write_bytes(path.read_bytes()[:-5])
    assert [line.timestamp for line in read_lines([path])] == [1.0]
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(TraceUnreadable, match="line 2"):
        list(read_lines([path]))


def test_ids_of_blocks_are_the_same_everywhere_and_fit_a_double() -> None:
    names = [bytes(range(16)), b"\xff" * 16]
    assert hash_ids(names) == (0x050403020100, 2**48 - 1)


async def test_files_are_rotated_within_their_size_and_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.jsonl"
    trace = TraceFile(path, max_bytes=4000)
    for number in range(200):
        trace.add(TraceLine(timestamp=float(number), input_length=number))
        if number % 7 == 0:
            await trace.flush()
    await trace.flush()
    files = rotated_files(path)
    assert len(files) == NUM_FILES
    assert sum(file.stat().st_size for file in files) <= 4000
    numbers = [line.input_length for line in read_lines(files)]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 20


async def test_a_disk_that_takes_nothing_costs_lines_but_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    trace = TraceFile(tmp_path / "file" / "trace", max_bytes=4000)
    trace.add(TraceLine(timestamp=1.0))
    await trace.flush()
    assert trace.num_dropped == 1
    monkeypatch.setattr(trace_file, "MAX_WAITING", 2)
    for _ in range(5):
        trace.add(TraceLine(timestamp=1.0))
    assert trace.num_dropped == 4


@pytest.mark.parametrize("cut_at", [1, 30, -1])
@pytest.mark.parametrize("num_whole", [0, 3])
async def test_a_line_that_a_crash_cut_short_does_not_spoil_the_next(
    tmp_path: Path, num_whole: int, cut_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "TAIL_BYTES", 16)
    path = write(tmp_path / "trace", *(TraceLine(timestamp=float(n)) for n in range(num_whole)))
    with path.open("ab") as file:
        file.write(encode_line(TraceLine(timestamp=100.0, hash_ids=tuple(range(9))))[:cut_at])
    trace = TraceFile(path, max_bytes=100_000)
    for number in range(2):
        trace.add(TraceLine(timestamp=200.0 + number))
        await trace.flush()
    assert [line.timestamp for line in read_lines([path])] == [*map(float, range(num_whole)), 200.0, 201.0]


async def test_a_disk_that_was_full_in_mid_line_leaves_whole_lines_and_a_right_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = TraceFile(tmp_path / "trace", max_bytes=100_000)
    trace.add(TraceLine(timestamp=1.0))
    await trace.flush()

    def full(self: Path, mode: str) -> object:
        opened = open(self, mode)  # noqa: SIM115  # the caller's `with` closes it
        if mode != "ab":
            return opened

        class Full:
            def __enter__(self) -> "Full":
                return self

            def __exit__(self, *_: object) -> None:
                opened.close()

            def write(self, data: bytes) -> None:
                opened.write(data[:20])
                raise OSError(28, "No space left on device")

        return Full()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        for _ in range(3):
            trace.add(TraceLine(timestamp=2.0))
        await trace.flush()
    assert trace.num_dropped == 3
    trace.add(TraceLine(timestamp=3.0))
    await trace.flush()
    assert [line.timestamp for line in read_lines([tmp_path / "trace"])] == [1.0, 3.0]
