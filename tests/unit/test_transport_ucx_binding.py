"""The binding of libucp: layouts as in its headers, addresses, and which library is loaded."""

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.transport.port import LinkLost
from libs.transport.ucx import abi, ucp_library
from libs.transport.ucx.bootstrap import format_address, parse_address

OFFSETS = {
    abi.Params: {"features": 8, "mt_workers_shared": 48, "estimated_num_eps": 56, "name": 72},
    abi.WorkerParams: {"thread_mode": 8, "events": 144, "event_fd": 160, "flags": 168},
    abi.WorkerAttr: {"address": 16, "address_length": 24, "max_am_header": 32},
    abi.EndpointParams: {
        "address": 8,
        "err_mode": 16,
        "err_handler_cb": 24,
        "user_data": 40,
        "flags": 48,
        "sockaddr": 56,
        "conn_request": 72,
        "name": 80,
    },
    abi.RequestParam: {
        "flags": 4,
        "request": 8,
        "cb": 16,
        "datatype": 24,
        "user_data": 32,
        "memory_type": 48,
    },
    abi.MessageHandlerParam: {"id": 8, "flags": 12, "cb": 16, "arg": 24},
}
"""From a C program compiled with the headers of 1.13 and 1.22."""


@pytest.mark.parametrize("struct", OFFSETS)
def test_fields_lie_where_the_headers_put_them(struct: type[ctypes.Structure]) -> None:
    assert {name: getattr(struct, name).offset for name in OFFSETS[struct]} == OFFSETS[struct]


def test_every_prototype_exists_in_the_library_found() -> None:
    loaded = ucp_library.load_library()
    assert tuple(int(part) for part in loaded.version.split(".")[:2]) >= abi.API_VERSION
    assert loaded.status_text(-16) == "Request canceled (-16)"


def test_a_library_that_is_not_there_is_said_with_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ucp_library.LIBRARY_VARIABLE, "/nowhere/libucp.so.0")
    with pytest.raises(ucp_library.UcxUnavailable, match="tried: /nowhere/libucp"):
        ucp_library.load_library()


def test_a_library_that_is_no_libucp_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ucp_library.LIBRARY_VARIABLE, "libc.so.6")
    with pytest.raises(ucp_library.UcxUnavailable, match="undefined symbol"):
        ucp_library.load_library()


def test_the_wheels_library_comes_before_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ucp_library.LIBRARY_VARIABLE, raising=False)
    assert "site-packages" in str(Path(ucp_library.load_library().path))


def test_transports_that_do_not_exist_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "carrier_pigeon")
    with pytest.raises(ucp_library.UcxUnavailable, match="UCX_TLS"):
        ucp_library.load_library().open_context()


@given(st.sampled_from(["127.0.0.1", "worker-1", "::1", "fd00::2"]), st.integers(1, 65535))
def test_an_address_is_read_as_it_was_written(host: str, port: int) -> None:
    assert parse_address(format_address(host, port)) == (host, port)


def test_a_wildcard_is_told_as_this_machines_name() -> None:
    assert parse_address(format_address("0.0.0.0", 7))[0] not in ("", "0.0.0.0")


@given(
    st.one_of(
        st.text(max_size=40), st.sampled_from(["ucx://", "ucx://h", "ucx://h:x", "tcp://h:1", "ucx://[::"])
    )
)
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(LinkLost, match="no UCX address"):
        parse_address(text)
