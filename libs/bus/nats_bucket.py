"""A JetStream key-value bucket in the broker's memory, readable with `nats kv`.

It vanishes with the broker, so it is made anew on each connection. nats-py's own key-value face does not
expect that.
"""

import asyncio
from typing import Any

import msgspec
import structlog

from libs.bus.nats_connection import NatsConnection
from libs.bus.port import NoResponders, PresenceUnavailable, RequestTimedOut

MAX_BUCKET_BYTES = 64 * 2**20
STORE_TIMEOUT_SECONDS = 1.0

OPERATION_HEADER, _STATUS_HEADER, _SEQUENCE_HEADER = "KV-Operation", "Status", "Nats-Sequence"
_EXPECTED_SEQUENCE_HEADER = "Nats-Expected-Last-Subject-Sequence"
_EXISTS_WITH_OTHER_SETTINGS = 10058
_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})

log = structlog.get_logger()


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Response(msgspec.Struct):
    """As much of JetStream's answers as matters here."""

    error: _Error | None = None
    state: _State = msgspec.field(default_factory=_State)
    seq: int = 0


class JetStreamRefused(PresenceUnavailable):
    """JetStream answered with an error."""

    def __init__(self, what: str, error: _Error) -> None:
        super().__init__(f"{what}: JetStream refused: {error.description} ({error.err_code})")
        self.code = error.err_code


class Stored(msgspec.Struct, frozen=True):
    """What a bucket has under a key: `value` None after a delete, or where nothing is; `sequence` 0 then."""

    value: bytes | None
    sequence: int


class NatsBucket:
    """Keys and values that expire. Raises NotConnected, RequestTimedOut, PresenceUnavailable."""

    def __init__(self, connection: NatsConnection, name: str, description: str, ttl_seconds: float) -> None:
        self._connection, self.name, self._ttl_seconds = connection, name, ttl_seconds
        self.stream, self.prefix = f"KV_{name}", f"$KV.{name}."
        self._settings = _settings(name, description, ttl_seconds)
        self._exists = False
        self._making = asyncio.Lock()
        connection.on_lost(self._was_lost)

    async def put(self, key: str, value: bytes, *, is_delete: bool = False) -> int:
        """Store, whatever is there; returns the entry's sequence."""
        return await self._store(key, value, {OPERATION_HEADER: "DEL"} if is_delete else None)

    async def replace(self, key: str, value: bytes, sequence: int, *, is_delete: bool = False) -> int | None:
        """Store where the entry's sequence is still this one (0: where there is none); None: it is not."""
        headers = {_EXPECTED_SEQUENCE_HEADER: str(sequence)}
        if is_delete:
            headers[OPERATION_HEADER] = "DEL"
        try:
            return await self._store(key, value, headers)
        except JetStreamRefused as error:
            if error.code in _WRONG_LAST_SEQUENCE:
                return None
            raise

    async def get(self, key: str) -> Stored:
        """What is there now."""
        await self.ensure()
        entry = await self._connection.ask_message(
            f"$JS.API.DIRECT.GET.{self.stream}.{self.prefix}{key}", b"", STORE_TIMEOUT_SECONDS
        )
        headers = entry.headers or {}
        return Stored(value_of(entry.data, headers), int(headers.get(_SEQUENCE_HEADER, 0)))

    async def keys(self) -> list[str]:
        """All that were put and have not expired; deleted ones too."""
        await self.ensure()
        info = await self._administrate("INFO", {"subjects_filter": f"{self.prefix}>"})
        return [subject.removeprefix(self.prefix) for subject in info.state.subjects or ()]

    async def ensure(self) -> None:
        """Make it where it is not there."""
        async with self._making:
            if not self._exists:
                await self._make()
                self._exists = self._connection.is_connected

    def _was_lost(self) -> None:
        self._exists = False

    async def _store(self, key: str, value: bytes, headers: dict[str, str] | None) -> int:
        await self.ensure()
        try:
            answer = await self._connection.ask_message(
                self.prefix + key, value, STORE_TIMEOUT_SECONDS, headers
            )
        except (NoResponders, RequestTimedOut) as error:
            self._exists = False  # somebody removed it; the next put makes it again
            raise PresenceUnavailable(f"{key} was not stored in {self.name}: {error}") from error
        return _read_response(answer.data, f"storing {key} in {self.name}").seq

    async def _make(self) -> None:
        """Harmless where it is there already."""
        try:
            await self._administrate("CREATE", self._settings)
        except JetStreamRefused as error:
            if error.code != _EXISTS_WITH_OTHER_SETTINGS:
                raise
            await self._administrate("UPDATE", self._settings)
            log.warning("bucket_changed", bucket=self.name, ttl_seconds=self._ttl_seconds)

    async def _administrate(self, verb: str, arguments: dict[str, Any]) -> _Response:
        try:
            answer = await self._connection.ask(
                f"$JS.API.STREAM.{verb}.{self.stream}", msgspec.json.encode(arguments), STORE_TIMEOUT_SECONDS
            )
        except NoResponders:
            raise PresenceUnavailable("JetStream is off in the broker; presence needs it") from None
        return _read_response(answer, f"{verb} {self.name}")


def value_of(data: bytes, headers: dict[str, str] | None) -> bytes | None:
    """None for a delete, a purge, and for what has expired since it was listed."""
    return None if headers and (OPERATION_HEADER in headers or _STATUS_HEADER in headers) else data


def _settings(name: str, description: str, ttl_seconds: float) -> dict[str, Any]:
    """What makes a stream a key-value bucket, as in the NATS key-value specification (ADR-8)."""
    ttl_nanoseconds = int(ttl_seconds * 1e9)
    return {
        "name": f"KV_{name}",
        "description": description,
        "subjects": [f"$KV.{name}.>"],
        "storage": "memory",
        "retention": "limits",
        "discard": "new",
        "max_age": ttl_nanoseconds,
        "duplicate_window": ttl_nanoseconds,
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "max_bytes": MAX_BUCKET_BYTES,
        "num_replicas": 1,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
    }


def _read_response(answer: bytes, what: str) -> _Response:
    try:
        response = msgspec.json.decode(answer, type=_Response)
    except msgspec.DecodeError as error:
        raise PresenceUnavailable(f"{what}: JetStream answered {answer[:200]!r}") from error
    if response.error is not None:
        raise JetStreamRefused(what, response.error)
    return response
