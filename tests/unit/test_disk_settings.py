import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv_store.disk.settings import SMALLEST_CAP_BYTES, DiskSettings
from services.kv_store.disk.slot_map import SlotMap

caps = st.integers(SMALLEST_CAP_BYTES, 64 << 40)


@given(caps)
def test_files_are_few_enough_to_stay_open_and_a_freed_one_is_a_small_part(cap_bytes: int) -> None:
    settings = DiskSettings(cap_bytes=cap_bytes)
    assert cap_bytes / settings.segment_file_bytes <= 257
    assert settings.segment_file_bytes <= cap_bytes / 16
    assert settings.probe_bytes <= cap_bytes / 64


@given(caps)
def test_an_empty_tier_has_most_of_its_cap_for_blocks(cap_bytes: int) -> None:
    settings = DiskSettings(cap_bytes=cap_bytes)
    slots = SlotMap(cap_bytes, settings.segment_file_bytes, settings.write_buffer_bytes)
    shape = (30, 12288)
    assert slots.num_allocatable(shape) * shape[0] * shape[1] >= 0.8 * cap_bytes


def test_a_segment_size_that_was_asked_for_is_used() -> None:
    assert DiskSettings(cap_bytes=1 << 30, segment_bytes=5 << 20).segment_file_bytes == 5 << 20


@pytest.mark.parametrize(
    ("field", "value"), [("cap_bytes", SMALLEST_CAP_BYTES - 1), ("fsync", "often"), ("retry_seconds", 0)]
)
def test_settings_that_cannot_work_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({"cap_bytes": 1 << 30} | {field: value}, DiskSettings)
