"""What children write: kept whole and bounded, errors shown at once."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.up.child_output import ChildOutput, LogFile, error_line
from services.up.display import PlainDisplay


def event(level: str, text: str, **fields: object) -> bytes:
    return (
        json.dumps({"event": text, "level": level, "timestamp": "t", "service": "s", **fields}).encode()
        + b"\n"
    )


def test_errors_are_given_back_in_one_line_and_the_rest_is_only_kept() -> None:
    kept = bytearray()
    output = ChildOutput(kept.extend)
    said = event("info", "opened") + event("error", "link_lost", peer="p\n1") + event("critical", "gone")
    assert output.feed(said) == ["link_lost peer=p 1", "gone"]
    assert bytes(kept) == said


@given(
    st.lists(st.sampled_from([event("error", "e1"), event("info", "i"), b"plain\n", b"\n", b"{broken\n"])),
    st.data(),
)
def test_it_does_not_matter_how_the_bytes_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    whole, kept, shown, at = b"".join(lines), bytearray(), [], 0
    output = ChildOutput(kept.extend)
    while at < len(whole):
        step = data.draw(st.integers(1, len(whole) - at))
        shown += output.feed(whole[at : at + step])
        at += step
    assert bytes(kept) == whole
    assert shown == ["e1"] * lines.count(event("error", "e1"))
    num_plain = lines.count(b"plain\n") + lines.count(b"{broken\n")
    assert len(output.last_plain_lines) == min(num_plain, 12)


def test_the_reason_of_an_exception_is_its_last_line() -> None:
    trace = "Traceback (most recent call last):\n  File x\nValueError: no such layer"
    assert (
        error_line({"event": "failed", "level": "error", "exception": trace})
        == "failed ValueError: no such layer"
    )


def test_two_files_bound_the_space_of_a_log(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", max_bytes=100)
    for i in range(100):
        log.write(b"%09d\n" % i)
    log.close()
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 100
    assert (tmp_path / "a.log").read_bytes().endswith(b"000000099\n")


def test_a_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        log = LogFile(tmp_path / "a.log")
        log.write(line)
        log.close()
    assert (tmp_path / "a.log").read_bytes() == b"one\ntwo\n"


def test_plain_progress_is_a_line_per_step_not_per_percent(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(lambda: None)
    for percent in range(0, 101, 5):
        display.busy("decode-0", f"loading weights {percent}%")
    display.busy("decode-0", "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "decode-0      loading weights 0%"
    assert len(lines) == 6
