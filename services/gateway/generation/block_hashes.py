"""Hashes of a prompt's blocks, as the workers of the model form them."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.kv.names import block_names

MAX_TOKENS_ON_LOOP = 32768
"""About 1.6 ms of hashing; longer prompts go to a thread."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What hashes depend on besides salt and tokens."""

    fingerprint: str
    block_size: int


def layout_of(services: Iterable[Presence]) -> BlockLayout | None:
    """The layout of most of the ready workers that run prompts; None where none is ready or says one."""
    known = Counter(
        presence.model_fingerprint
        for presence in services
        if presence.state is ServiceState.READY
        and (presence.kind is ServiceKind.PREFILL_WORKER or presence.runs_prompts)
    )
    layouts = [(count, text, layout) for text, count in known.items() if (layout := parse_layout(text))]
    return max(layouts, key=lambda entry: entry[:2])[2] if layouts else None


def parse_layout(model_fingerprint: str) -> BlockLayout | None:
    """From a presence's word for it, `<fingerprint>-<block size>`; None where it is of another shape."""
    fingerprint, _, size = model_fingerprint.rpartition("-")
    if not (fingerprint and size.isascii() and size.isdigit() and 0 < int(size) < 2**16):
        return None
    return BlockLayout(fingerprint, int(size))


async def prompt_hashes(layout: BlockLayout | None, token_ids: list[int], cache_salt: str) -> bytes:
    """Hashes of the full blocks, 16 bytes each; empty where no layout is known."""
    if layout is None:
        return b""
    await asyncio.sleep(0)  # one request may have hundreds of prompts
    if len(token_ids) <= MAX_TOKENS_ON_LOOP:
        return _hashes(token_ids, layout, cache_salt)
    return await asyncio.to_thread(_hashes, token_ids, layout, cache_salt)


def _hashes(token_ids: list[int], layout: BlockLayout, cache_salt: str) -> bytes:
    return b"".join(block_names(token_ids, layout.block_size, layout.fingerprint, cache_salt))
