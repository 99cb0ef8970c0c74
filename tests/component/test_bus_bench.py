"""What `make bench` asks of the bus."""

import pytest

from tests.bench import bus


async def test_the_bus_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "NUM_REQUESTS", 160)
    monkeypatch.setattr(bus, "NUM_FRAMES", 640)
    figures = await bus.measure()
    assert 0 < figures["request_p50_seconds"] <= figures["request_p99_seconds"] < 1
    assert figures["requests_per_second_16_in_flight"] > 100
    assert figures["frames_published_per_second"] > 1000
    assert figures["frames_delivered_per_second"] > 1000
    assert 0 < figures["restart_seconds"] < 5
