"""From settings to a model in memory and an engine's sizes."""

import asyncio
import time

import structlog
import torch

from libs.engine.settings import EngineSettings, pool_blocks
from libs.kv.tensors import BlockShape
from libs.model.layer import layer_bytes
from libs.model.layer_weights import layer_weight_bytes
from libs.model.load import find_model, load_model
from libs.model.model import Model
from libs.runtime.runtime import Runtime
from libs.transport.choose import make_transport
from libs.transport.port import Transport
from libs.worker.settings import WorkerSettings

GIB = 1 << 30
PROGRESS_SECONDS = 0.2

log = structlog.get_logger()


def choose_device(device: str) -> torch.device:
    """The device that a setting means."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision that a setting means on this device."""
    if dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
    # On a CPU without bfloat16 instructions every product is converted back and forth.
    features = torch.cpu.get_capabilities()
    is_fast = device.type == "cuda" or features.get("avx512_bf16") or features.get("amx_bf16")
    return torch.bfloat16 if is_fast else torch.float32


async def open_model(settings: WorkerSettings, runtime: Runtime) -> Model:
    """Load the model in a thread; others see the progress in this process's presence."""
    loop = asyncio.get_running_loop()
    device = choose_device(settings.device)
    started = time.monotonic()
    last_told = 0.0

    def on_progress(share: float) -> None:
        nonlocal last_told
        if time.monotonic() - last_told > PROGRESS_SECONDS:
            last_told = time.monotonic()
            loop.call_soon_threadsafe(runtime.progress, f"loading weights {share:.0%}")

    def load() -> Model:
        return load_model(
            find_model(settings.model),
            dtype=choose_dtype(settings.dtype, device),
            device=device,
            on_progress=on_progress,
            max_model_len=settings.max_model_len or None,
        )

    runtime.progress("loading weights")
    model = await asyncio.to_thread(load)
    log.info(
        "model_loaded",
        model=settings.model,
        dtype=str(model.dtype),
        device=str(model.device),
        seconds=round(time.monotonic() - started, 2),
    )
    return model


def max_model_len_of(settings: WorkerSettings, model: Model) -> int:
    """What is asked for, within what the model was made for."""
    limit = model.config.max_position_embeddings
    return min(settings.max_model_len, limit) if settings.max_model_len else limit


def max_sequence_len_of(settings: WorkerSettings, model: Model) -> int:
    """Tokens that one sequence may have here: within the context length, and what the whole pool holds."""
    layers_bytes = model.config.num_layers * block_shape_of(model, settings.block_size).num_bytes
    num_blocks = pool_blocks(engine_settings_of(settings, model), layers_bytes)
    return min(max_model_len_of(settings, model), num_blocks * settings.block_size)


def engine_settings_of(settings: WorkerSettings, model: Model) -> EngineSettings:
    """The engine's sizes."""
    return EngineSettings(
        max_model_len=max_model_len_of(settings, model),
        num_blocks=settings.num_blocks or None,
        kv_memory_bytes=int(settings.kv_memory_gib * GIB),
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_threads=settings.threads or None,
        device_share=settings.device_share,
        hosting_timeout_seconds=settings.hosting_timeout_seconds,
    )


def block_shape_of(model: Model, block_size: int) -> BlockShape:
    """One KV block of one layer of this model."""
    return BlockShape(model.config.num_kv_heads, block_size, model.config.head_dim, model.dtype)


def fingerprint_of(settings: WorkerSettings, model: Model) -> str:
    """Of the model and its blocks: with another block size KV is other KV, of the same weights."""
    return f"{model.fingerprint}-{settings.block_size}"


def describe_instance(
    runtime: Runtime,
    settings: WorkerSettings,
    model: Model,
    *,
    hosting_address: str,
    calls_address: str,
) -> None:
    """Tell others which model runs here, and whose KV it can share."""
    config, block_bytes = model.config, block_shape_of(model, settings.block_size).num_bytes
    sizes = engine_settings_of(settings, model)
    runtime.describe(
        model=settings.model,
        model_fingerprint=fingerprint_of(settings, model),
        max_model_len=max_model_len_of(settings, model),
        num_layers=config.num_layers,
        block_bytes=config.num_layers * block_bytes,
        hosting_address=hosting_address,
        calls_address=calls_address,
        num_kv_heads=config.num_kv_heads,
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        element_bytes=model.dtype.itemsize,
        layer_weight_bytes=layer_weight_bytes(config, model.dtype),
        layer_memory_bytes=layer_bytes(model.layer(0)),
        kv_memory_bytes=pool_blocks(sizes, config.num_layers * block_bytes) * config.num_layers * block_bytes,
        device_share=settings.device_share,
    )


def open_transport(settings: WorkerSettings, runtime: Runtime) -> Transport:
    """This process's end of all Links. Raises ValueError without a secret."""
    return make_transport(settings.transport, runtime.incarnation, settings.link_secret.encode())
