"""Requests read from files, and made up."""

import json
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

from libs.kv.access_trace import TraceLine, encode_line, hash_ids
from libs.simulator.synthetic import Arrivals, SyntheticLoad, make_load
from libs.simulator.trace import BadTrace, TraceRequest, check_blocks, read_trace


def read_all(*paths, **how):
    return read_trace(paths, **how)


def written(tmp_path, *lines, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def row(timestamp=0, input_length=100, output_length=5, hash_ids=(0, 1)):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }


def test_requests_come_in_order_of_time_from_zero(tmp_path):
    requests = read_all(written(tmp_path, row(5000), row(2000, 7), row(3500)))
    assert [request.arrival_seconds for request in requests] == [0.0, 1.5, 3.0]
    assert requests[0].num_input_tokens == 7


def test_a_trace_can_be_replayed_faster_and_in_part(tmp_path):
    path = written(tmp_path, row(0), row(3000), row(9000))
    requests = read_all(path, speed_up=3.0, max_requests=2)
    assert [request.arrival_seconds for request in requests] == [0.0, 1.0]


def test_equal_ids_are_equal_names(tmp_path):
    first, second = read_all(written(tmp_path, row(hash_ids=[7, 8]), row(1, hash_ids=[7, 9])))
    assert first.names[0] == second.names[0]
    assert first.names[1] != second.names[1]
    assert {len(name) for name in (*first.names, *second.names)} == {16}


def test_what_a_store_recorded_is_read_with_its_rotated_files(tmp_path):
    names = [bytes([number]) * 16 for number in range(3)]
    lookup = TraceLine(timestamp=5.0, input_length=50, hash_ids=hash_ids(names), request_id="r", tenant="t")
    put = TraceLine(timestamp=6.0, output_length=9, hash_ids=hash_ids(names), request_id="r", kind="put")
    later = TraceLine(timestamp=9.0, input_length=20, hash_ids=hash_ids(names[:1]), request_id="s")
    (tmp_path / "access.jsonl.1").write_bytes(encode_line(lookup) + encode_line(put))
    (tmp_path / "access.jsonl").write_bytes(encode_line(later))
    first, second = read_all(tmp_path / "access.jsonl")
    assert (first.num_input_tokens, first.num_output_tokens, first.tenant) == (50, 9, "t")
    assert len(first.names) == 3
    assert second.names == first.names[:1]
    assert second.arrival_seconds == pytest.approx(0.004)


def test_what_two_stores_recorded_of_a_request_is_one_request(tmp_path):
    for number, hits in enumerate(((1, 2), (3,))):
        line = TraceLine(timestamp=7.0 + number, input_length=60, hash_ids=hits, request_id="r")
        (tmp_path / f"store-{number}.jsonl").write_bytes(encode_line(line))
    (request,) = read_all(tmp_path / "store-0.jsonl", tmp_path / "store-1.jsonl")
    assert len(request.names) == 3


@pytest.mark.parametrize(
    "bad",
    [
        "{not json",
        row(input_length=0),
        row(hash_ids=[-1]),
        row(hash_ids=["xyz"]),
        row(hash_ids=[1 << 128]),
        row(input_length="long"),
    ],
)
def test_what_is_no_request_is_named(tmp_path, bad):
    with pytest.raises(BadTrace, match=r"trace\.jsonl(, line 2: |: request [12] in order of time: )"):
        read_all(written(tmp_path, row(), bad))


@pytest.mark.parametrize(
    ("num_tokens", "num_names", "fits"), [(100, 2, False), (100, 3, True), (100, 4, True)]
)
def test_block_ids_must_be_as_many_as_blocks_of_the_size_that_is_said(num_tokens, num_names, fits):
    request = TraceRequest(0.0, num_tokens, 1, [bytes(16)] * num_names)
    expectation = nullcontext() if fits else pytest.raises(BadTrace, match="not those of blocks of 32")
    with expectation:
        check_blocks([TraceRequest(0.0, 5, 1, []), request], block_size=32)


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(BadTrace, match="no request"):
        read_all(written(tmp_path, {"timestamp": 1, "kind": "put", "hash_ids": [1]}))


def test_azures_lengths_are_read_and_have_no_names(tmp_path):
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
        name="azure.csv",
    )
    first, second = read_all(path)
    assert (first.num_input_tokens, first.num_output_tokens, first.names) == (374, 44, [])
    assert second.arrival_seconds == pytest.approx(4.31458, abs=1e-4)


def test_a_bad_line_of_azures_is_named(tmp_path):
    path = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,3,4", name="azure.csv")
    with pytest.raises(BadTrace, match=r"azure\.csv, line 2: "):
        read_all(path)


LOAD = SyntheticLoad(num_requests=4000, requests_per_second=20.0, num_prefixes=50)


def test_a_load_is_the_same_for_the_same_seed_alone():
    assert make_load(LOAD, block_size=16, seed=1) == make_load(LOAD, block_size=16, seed=1)
    assert make_load(LOAD, block_size=16, seed=1) != make_load(LOAD, block_size=16, seed=2)


@pytest.mark.parametrize("arrivals", list(Arrivals))
def test_requests_arrive_at_the_rate_asked_for(arrivals):
    load = SyntheticLoad(num_requests=20_000, requests_per_second=20.0, arrivals=arrivals)
    requests = make_load(load, block_size=256, seed=3)
    assert requests[0].arrival_seconds == 0.0
    assert len(requests) / requests[-1].arrival_seconds == pytest.approx(20.0, rel=0.1)


def test_bursts_are_burstier_than_chance_and_chance_than_a_clock():
    variation = {}
    for arrivals in Arrivals:
        load = SyntheticLoad(num_requests=5000, arrivals=arrivals)
        gaps = np.diff([request.arrival_seconds for request in make_load(load, block_size=256, seed=4)])
        variation[arrivals] = gaps.std() / gaps.mean()
    assert variation[Arrivals.CONSTANT] == pytest.approx(0.0, abs=1e-6)
    assert variation[Arrivals.POISSON] == pytest.approx(1.0, abs=0.1)
    assert variation[Arrivals.BURSTY] > 3


def test_prefixes_are_asked_for_as_zipf_says():
    requests = make_load(LOAD, block_size=16, seed=5)
    counts = sorted(Counter(request.names[0] for request in requests).values(), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2**1.2, rel=0.2)
    assert len(counts) <= LOAD.num_prefixes


def test_what_is_shared_is_the_prefix_and_nothing_else():
    load = SyntheticLoad(num_requests=50, num_prefixes=1, num_prefix_tokens=64, num_own_tokens=100)
    requests = make_load(load, block_size=16, seed=6)
    shared = {tuple(request.names[:4]) for request in requests}
    own = [name for request in requests for name in request.names[4:]]
    assert len(shared) == 1
    assert len(set(own)) == len(own)
    for request in requests:
        assert len(request.names) == request.num_input_tokens // 16


def test_a_load_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="requests, prefixes and a rate"):
        make_load(SyntheticLoad(num_requests=0), block_size=16, seed=0)
