"""A name for exactly these weights, config and dtype; blocks of the KV cache are named under it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from libs.model.checkpoint import TensorSpan
from libs.model.config import ModelConfig

_SAMPLE_BYTES = 4096
_SAMPLES_PER_TENSOR = 8


def fingerprint(config: ModelConfig, spans: Mapping[str, TensorSpan], dtype: str) -> str:
    """32 hex digits, the same in every process and wherever the files lie.

    Of each tensor, name, encoding, shape and up to eight evenly spread samples of 4 KiB count: any training
    changes all of a tensor, and hashing every byte of a large model would take longer than mapping it.
    """
    digest = config_digest(config, dtype)
    files: dict[Path, BinaryIO] = {}
    try:
        for name, span in sorted(spans.items()):
            if span.path not in files:
                files[span.path] = span.path.open("rb")
            digest.update(json.dumps([name, span.encoding, span.shape, span.num_bytes]).encode())
            _sample(digest, files[span.path], span)
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest(length=16)


def config_digest(config: ModelConfig, dtype: str) -> blake3:
    """A digest that has taken in what a model is apart from its weights."""
    facts = asdict(config) | {"architecture": config.architecture.value, "dtype": dtype}
    # The ends of text and the length served decide how long an answer is, not what a block holds.
    for name in ("eos_token_ids", "bos_token_id", "max_position_embeddings"):
        del facts[name]
    return blake3(json.dumps(facts, sort_keys=True).encode())


def _sample(digest: blake3, file: BinaryIO, span: TensorSpan) -> None:
    last = max(0, span.num_bytes - _SAMPLE_BYTES)
    for offset in sorted({last * index // (_SAMPLES_PER_TENSOR - 1) for index in range(_SAMPLES_PER_TENSOR)}):
        file.seek(span.start + offset)
        digest.update(file.read(min(_SAMPLE_BYTES, span.num_bytes - offset)))
