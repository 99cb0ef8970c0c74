"""Recorded loads to replay: Mooncake's JSONL (prefix-chained block ids) and Azure's CSV (lengths only)."""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from loadtest.conversation import Arrival, Conversation, Turn
from loadtest.words import text_of


class TraceError(Exception):
    """A trace cannot be read; carries file and line."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line. `hash_ids` name the prompt's blocks: equal ids are equal text."""

    at_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class ReplayRules:
    """How a trace becomes requests."""

    block_tokens: int = 512
    """Tokens that one hash id stands for."""
    speed: float = 1.0
    """2: in half the time."""
    length_scale: float = 1.0
    """0.1: prompts and answers of a tenth of their lengths; what was shared stays shared."""
    max_input_tokens: int | None = None
    """Longer prompts are cut at their ends; None: none is."""
    max_output_tokens: int | None = None
    id_range: tuple[int, int] | None = None
    """Prompts as token ids from this range, exact in length; None: as words."""


def read_trace(path: Path) -> Iterator[TracedRequest]:
    """The requests of a .csv (Azure) or a .jsonl (Mooncake) in order of time. Raises TraceError, OSError."""
    reader = _azure if path.suffix == ".csv" else _mooncake
    with path.open(newline="") as file:
        for number, line in enumerate(_lines(file, is_csv=path.suffix == ".csv"), start=1):
            try:
                traced = reader(line)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}: record {number} is no request of a trace: {error!r}") from error
            if traced is not None:
                yield traced


def replay(requests: Iterator[TracedRequest], rules: ReplayRules, seed: int = 0) -> Iterator[Arrival]:
    """The same load again: times from its first request on, synthetic text."""
    first = next(requests, None)
    if first is None:
        return
    for number, traced in enumerate(chain((first,), requests)):
        at_seconds = max(0.0, traced.at_seconds - first.at_seconds) / rules.speed
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


def _lines(file: Any, *, is_csv: bool) -> Iterator[dict[str, Any]]:
    if is_csv:
        yield from csv.DictReader(file)
    else:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(line, f"{file.name}: line {number}")


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where} is not a JSON object")
    return record


def _mooncake(record: dict[str, Any]) -> TracedRequest | None:
    if "input_length" not in record:
        return None  # other events may stand between the requests
    return TracedRequest(
        at_seconds=float(record["timestamp"]) / 1000,
        num_input_tokens=int(record["input_length"]),
        num_output_tokens=int(record["output_length"]),
        hash_ids=tuple(record.get("hash_ids", ())),
    )


def _azure(record: dict[str, Any]) -> TracedRequest:
    return TracedRequest(
        at_seconds=datetime.fromisoformat(record["TIMESTAMP"]).timestamp(),
        num_input_tokens=int(record["ContextTokens"]),
        num_output_tokens=int(record["GeneratedTokens"]),
    )
