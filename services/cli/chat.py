"""kvmesh chat: one answer, or a conversation."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO

from services.cli.gateway import Answer, ChatRequest, Gateway, GatewayError


def opening(prompt: str, system: str) -> list[dict[str, str]]:
    """The messages a chat begins with."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": prompt}]


def answer_once(gateway: Gateway, request: ChatRequest, *, as_json: bool, out: TextIO) -> None:
    """Stream one answer to `out`, or write one JSON object when it is complete. Raises GatewayError."""
    answer = Answer()
    for piece in gateway.chat(request, answer):
        if not as_json:
            out.write(piece)
            out.flush()
    out.write(json.dumps(report(answer), ensure_ascii=False) if as_json else "")
    out.write("\n")


def report(answer: Answer) -> dict[str, Any]:
    """The JSON object of --output json."""
    return {
        "model": answer.model,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "timings": {
            "time_to_first_token_seconds": answer.first_text_seconds,
            "total_seconds": answer.total_seconds,
            "tokens_per_second": answer.tokens_per_second,
        },
    }


def converse(gateway: Gateway, request: ChatRequest, *, read_line: Callable[[str], str], out: TextIO) -> None:
    """Ask and answer until the input ends. `request` brings model, parameters and the system message.

    Ctrl-C ends an answer, not the conversation; an error is shown and the question forgotten.
    """
    messages = list(request.messages)
    out.write("Chat with the mesh; Ctrl-D ends it.\n")
    while True:
        try:
            question = read_line("> ").strip()
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return
        if not question:
            continue
        asked = [*messages, {"role": "user", "content": question}]
        answer = Answer()
        try:
            for piece in gateway.chat(replace(request, messages=asked), answer):
                out.write(piece)
                out.flush()
        except KeyboardInterrupt:
            out.write(" [stopped]")
        except GatewayError as error:
            print(f"kvmesh: {error}", file=sys.stderr)
            continue
        out.write("\n")
        messages = [*asked, {"role": "assistant", "content": answer.text}]
