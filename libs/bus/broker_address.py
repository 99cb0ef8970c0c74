"""The broker's address, as people write it."""

from urllib.parse import urlsplit

import msgspec

DEFAULT_PORT = 4222
_SCHEMES = ("nats", "tls", "ws", "wss")


class BrokerAddress(msgspec.Struct, frozen=True):
    """`urls` as nats-py takes them; `shown` names hosts and ports only, so that no password gets into a
    log."""

    urls: tuple[str, ...]
    shown: str


def read_address(text: str) -> BrokerAddress:
    """From `nats://host:port`, `host` or several of them with commas between. Raises ValueError."""
    urls = tuple(
        part if "://" in part else f"nats://{part}" for part in (p.strip() for p in text.split(",")) if part
    )
    if not urls:
        raise ValueError("no broker address; expected nats://host:port")
    return BrokerAddress(urls, ", ".join(_shown(url) for url in urls))


def _shown(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"a broker address is malformed ({error}); expected nats://host:port") from None
    if parts.scheme not in _SCHEMES or not parts.hostname or not port or set(url) & set(" \t\n"):
        raise ValueError(f"a broker address is malformed ({parts.scheme}://...); expected nats://host:port")
    return f"{parts.hostname}:{port}"
