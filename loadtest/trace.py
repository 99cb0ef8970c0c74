"""Recorded loads to replay: Mooncake's JSONL (prefix-chained block ids) and Azure's CSV (lengths only)."""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from loadtest.conversation import Arrival, Conversation, Turn
from loadtest.words import text_of


class TraceError(Exception):
    """A trace cannot be read; carries file and line."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request. `hash_ids` name the prompt's blocks: equal ids are equal text."""

    at_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class ReplayRules:
    """How a trace becomes requests."""

    block_tokens: int = 512
    """Tokens that one hash id stands for: 512 in Mooncake's traces, the block size in those of KV stores."""
    speed: float = 1.0
    """2: in half the time."""
    length_scale: float = 1.0
    """0.1: prompts and answers of a tenth of their lengths; what was shared stays shared."""
    max_input_tokens: int | None = None
    """Longer prompts are cut at their ends; None: none is."""
    max_output_tokens: int | None = None
    id_range: tuple[int, int] | None = None
    """Prompts as token ids from this range, exact in length; None: as words."""


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a .csv (Azure) or of JSON lines (Mooncake), by time. Raises TraceError, OSError.

    KV stores write lines in Mooncake's fields, several for a request: those of a `request_id` are joined.
    """
    with path.open(newline="") as file:
        requests = _azure(path, file) if path.suffix == ".csv" else _mooncake(path, file)
    return sorted(requests, key=lambda request: request.at_seconds)


def replay(requests: Sequence[TracedRequest], rules: ReplayRules, seed: int = 0) -> Iterator[Arrival]:
    """The same load again: times from its first request on, synthetic text."""
    for number, traced in enumerate(requests):
        at_seconds = (traced.at_seconds - requests[0].at_seconds) / rules.speed
        num_output = _scaled(traced.num_output_tokens, rules.length_scale, rules.max_output_tokens)
        prompt = _prompt(traced, rules, f"{seed}", number)
        yield Arrival(at_seconds, Conversation(f"{seed}-{number}", (Turn(prompt, num_output),)))


def _prompt(traced: TracedRequest, rules: ReplayRules, seed: str, number: int) -> str | tuple[int, ...]:
    num_tokens = _scaled(traced.num_input_tokens, rules.length_scale, rules.max_input_tokens)
    num_block_tokens = max(1, round(rules.block_tokens * rules.length_scale))
    parts = [(f"{seed}-block-{hash_id}", num_block_tokens) for hash_id in traced.hash_ids]
    num_rest = num_tokens - num_block_tokens * len(parts)
    if num_rest > 0:  # rounding, or a trace that tells no blocks
        parts.append((f"{seed}-rest-{number}", num_rest))
    parts = parts[: -(-num_tokens // num_block_tokens) + 1]
    if rules.id_range is None:
        words = "".join(text_of(name, length) for name, length in parts).split()
        return "".join(f" {word}" for word in words[:num_tokens])
    ids = chain.from_iterable(_ids_of(name, length, rules.id_range) for name, length in parts)
    return tuple(ids)[:num_tokens]


def _ids_of(name: str, num_tokens: int, id_range: tuple[int, int]) -> list[int]:
    return random.Random(name).choices(range(*id_range), k=num_tokens)


def _scaled(num_tokens: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(num_tokens * scale))
    return scaled if limit is None else min(scaled, limit)


def _mooncake(path: Path, lines: Iterable[str]) -> list[TracedRequest]:
    """A store's line is a lookup unless its `kind` says else; its puts say how long an answer was."""
    requests: dict[str, TracedRequest] = {}
    num_output: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            record = _object(line)
            key = str(record.get("request_id") or f"line {number}")
            if record.get("kind", "lookup") == "lookup":
                requests[key] = _joined(requests.get(key), _lookup(record))
            num_output[key] = max(num_output.get(key, 0), int(record["output_length"]))
        except json.JSONDecodeError as error:
            if line.endswith("\n"):  # else its writer was stopped in the middle of it
                raise TraceError(f"{where} is not JSON: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{where} is no request of a trace: {error!r}") from error
    return [replace(traced, num_output_tokens=num_output[key]) for key, traced in requests.items()]


def _object(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    return record


def _lookup(record: dict[str, Any]) -> TracedRequest:
    return TracedRequest(
        at_seconds=float(record["timestamp"]) / 1000,
        num_input_tokens=int(record["input_length"]),
        num_output_tokens=0,
        hash_ids=tuple(record.get("hash_ids", ())),
    )


def _joined(first: TracedRequest | None, traced: TracedRequest) -> TracedRequest:
    if first is None:
        return traced
    return replace(first, hash_ids=tuple(dict.fromkeys((*first.hash_ids, *traced.hash_ids))))


def _azure(path: Path, lines: Iterable[str]) -> list[TracedRequest]:
    requests: list[TracedRequest] = []
    for number, record in enumerate(csv.DictReader(lines), start=2):
        try:
            at_seconds = datetime.fromisoformat(record["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
            traced = TracedRequest(at_seconds, int(record["ContextTokens"]), int(record["GeneratedTokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number} is no request of a trace: {error!r}") from error
        requests.append(traced)
    return requests
