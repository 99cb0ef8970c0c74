"""Where the broker is, as people write it."""

import pytest

from libs.bus.broker_address import read_address


@pytest.mark.parametrize(
    ("text", "urls", "shown"),
    [
        ("nats://host:1234", ("nats://host:1234",), "host:1234"),
        ("host", ("nats://host",), "host:4222"),
        ("127.0.0.1:4223", ("nats://127.0.0.1:4223",), "127.0.0.1:4223"),
        ("tls://[::1]:4222", ("tls://[::1]:4222",), "::1:4222"),
        ("nats://a:1, nats://b:2,", ("nats://a:1", "nats://b:2"), "a:1, b:2"),
    ],
)
def test_an_address_is_read(text: str, urls: tuple[str, ...], shown: str) -> None:
    address = read_address(text)
    assert address.urls == urls
    assert address.shown == shown


def test_what_is_shown_holds_no_password() -> None:
    address = read_address("nats://user:secret@host:1")
    assert address.urls == ("nats://user:secret@host:1",)
    assert address.shown == "host:1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ",
        "nats://",
        "nats://:secret",
        "nats://host:secret",
        "http://host",
        "nats://host:99999",
        "nats://host:0",
        "nats://ho st",
    ],
)
def test_a_malformed_address_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="nats://host:port") as caught:
        read_address(text)
    assert "secret@" not in str(caught.value)
