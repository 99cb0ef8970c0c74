"""What both workers make of their settings, before any weights are read."""

import pytest
import torch
from random_model import random_model

from libs.config.load import load_settings
from libs.model.config import Architecture, ModelConfig
from libs.worker.settings import WorkerSettings
from libs.worker.startup import (
    block_shape_of,
    choose_device,
    choose_dtype,
    engine_settings_of,
    max_model_len_of,
)
from services.decode_worker.settings import DecodeWorkerSettings
from services.prefill_worker.settings import PrefillWorkerSettings

CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=1,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=16,
    vocab_size=32,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=128,
)


def test_flags_become_the_engines_sizes() -> None:
    flags = (
        "--num-blocks 7 --block-size 8 --max-num-seqs 3 --max-num-batched-tokens 64 --threads 2 --role both"
    )
    settings = load_settings(DecodeWorkerSettings, flags.split(), {}, "decode_worker")
    engine = engine_settings_of(settings, random_model(CONFIG, 0, torch.float32))
    assert (engine.num_blocks, engine.block_size, engine.max_num_seqs) == (7, 8, 3)
    assert (engine.max_num_batched_tokens, engine.num_threads, engine.max_model_len) == (64, 2, 128)
    assert settings.role == "both"


def test_zero_leaves_the_pool_to_its_memory_and_the_threads_to_torch() -> None:
    settings = load_settings(PrefillWorkerSettings, ["--kv-memory-gib", "0.5"], {}, "prefill_worker")
    engine = engine_settings_of(settings, random_model(CONFIG, 0, torch.float32))
    assert (engine.num_blocks, engine.kv_memory_bytes, engine.num_threads) == (None, 1 << 29, None)


@pytest.mark.parametrize(("asked", "given"), [(0, 128), (64, 64), (4096, 128)])
def test_the_context_is_what_is_asked_for_within_what_the_model_was_made_for(asked: int, given: int) -> None:
    model = random_model(CONFIG, 0, torch.float32)
    assert max_model_len_of(WorkerSettings(max_model_len=asked), model) == given


def test_a_block_has_the_models_shape() -> None:
    shape = block_shape_of(random_model(CONFIG, 0, torch.bfloat16), 16)
    assert shape.num_bytes == 2 * 2 * 16 * 4 * 2


def test_precision_is_as_told_and_by_itself_fits_the_device() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float16", cpu) is torch.float16
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("auto", cpu) in (torch.bfloat16, torch.float32)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("auto").type in ("cpu", "cuda")
