"""Every section of the bench: what is measured together, and the aims."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from services.bench.figures import Figure, Section
from services.bench.machine import MachineRates, measure_machine

Say = Callable[[str], None]

DECODE_AIMS = {1: 60.0, 8: 400.0, 32: 1000.0}
PREFILL_TOKENS = 512
PREFILL_AIM = 4300.0
MODEL = "smollm2-135m-instruct"
MESH_PROMPT_TOKENS = (64, 512)


def machine(say: Say) -> list[Figure]:
    """The floor everything else is held against."""
    say("copy and matrix multiplication in torch")
    rates = measure_machine()
    threads = torch.get_num_threads()
    return [
        Figure(f"copy bandwidth, {threads} threads", rates.copy_bytes_per_second / 1e9, "GB/s"),
        Figure(f"bf16 GEMM rate, {threads} threads", rates.gemm_flops_per_second / 1e9, "GFLOP/s"),
    ]


def bus(say: Say) -> list[Figure]:
    """Control messages over a real broker."""
    from libs.bus.bench import measure_bus

    say("requests and publishes over NATS")
    return _plain(asyncio.run(measure_bus()))


def transport(say: Say) -> list[Figure]:
    """Links between two processes, against plain sockets and memcpy."""
    from libs.transport.bench import measure_transport

    say("Links over UCX and shared memory, with a second process")
    return _links(measure_transport())


def kernels(say: Say) -> list[Figure]:
    """Our kernels against torch's."""
    from kernels.bench import measure_kernels

    say("each kernel against torch")
    return _plain(measure_kernels())


def engine(say: Say) -> list[Figure]:
    """The engine alone against transformers, and both against the floor."""
    from libs.engine.bench import measure_engine
    from libs.model.load import find_model, load_model
    from services.bench import transformers_peer as peer_rates

    say("rates of this machine")
    rates = measure_machine()
    say(f"loading {MODEL}")
    model = load_model(find_model(MODEL), dtype=torch.bfloat16)
    say("the engine: decode at 1, 8 and 32 sequences, prefill of 512 tokens")
    ours = measure_engine(model)
    say("transformers: the same")
    peer = peer_rates.load_peer(MODEL, torch.bfloat16)
    figures: list[Figure] = []
    for num_sequences, aim in DECODE_AIMS.items():
        theirs = peer_rates.decode_tokens_per_second(peer, num_sequences)
        ours_here = ours.decode_tokens_per_second[num_sequences]
        name = f"decode, {num_sequences} sequences"
        figures.append(Figure(name, ours_here, "tokens/s", theirs, "transformers", at_least=aim))
        figures += _shares(model, name, ours_here / num_sequences, num_sequences, rates)
    theirs = peer_rates.prefill_tokens_per_second(peer, PREFILL_TOKENS)
    ours_here = ours.prefill_tokens_per_second
    figures.append(
        Figure("prefill, 512 tokens", ours_here, "tokens/s", theirs, "transformers", at_least=PREFILL_AIM)
    )
    flops_per_token = 2 * (_num_weights(model) - model.config.vocab_size * model.config.hidden_size)
    figures.append(
        Figure(
            "prefill, GEMM work alone",
            ours_here * flops_per_token / 1e9,
            "GFLOP/s",
            rates.gemm_flops_per_second / 1e9,
            "torch bf16 GEMM",
        )
    )
    return figures


def _shares(
    model: Any, name: str, steps_per_second: float, num_sequences: int, rates: MachineRates
) -> list[Figure]:
    """A decode step reads every weight once and multiplies each with every sequence."""
    num_weights = _num_weights(model)
    return [
        Figure(
            f"{name}: weights read",
            steps_per_second * num_weights * 2 / 1e9,
            "GB/s",
            rates.copy_bytes_per_second / 1e9,
            "copy",
        ),
        Figure(
            f"{name}: GEMM work",
            steps_per_second * num_sequences * num_weights * 2 / 1e9,
            "GFLOP/s",
            rates.gemm_flops_per_second / 1e9,
            "torch bf16 GEMM",
        ),
    ]


def _num_weights(model: Any) -> int:
    """Weights that a decode step reads: the layers' matrices and the head."""
    c = model.config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = 3 * c.hidden_size * c.intermediate_size
    return int(c.num_layers * (attention + mlp) + c.vocab_size * c.hidden_size)


def mesh(say: Say) -> list[Figure]:
    """What HTTP, router, hand-over and bus add to the engine, with the same threads per worker."""
    from libs.model.load import find_model, load_model
    from services.bench.mesh_overhead import NUM_STREAMS, measure_engine_alone, measure_mesh, running_mesh

    model = load_model(find_model(MODEL), dtype=torch.bfloat16)
    say("the engine alone, one thread")
    alone = asyncio.run(measure_engine_alone(model, MESH_PROMPT_TOKENS, num_threads=1))
    say("the mesh, one thread per worker")
    flags = ("--dtype", "bfloat16", "--threads", "1")
    with running_mesh(*flags) as url:
        meshed = asyncio.run(measure_mesh(url, MESH_PROMPT_TOKENS, model.config.vocab_size))
    figures: list[Figure] = []
    for length in MESH_PROMPT_TOKENS:
        mesh_ms, alone_ms = meshed.ttft_seconds[length] * 1e3, alone.ttft_seconds[length] * 1e3
        figures += [
            Figure(f"TTFT, {length} tokens", mesh_ms, "ms", alone_ms, "engine alone"),
            Figure(f"TTFT, {length} tokens: added by the mesh", mesh_ms - alone_ms, "ms", at_most=10.0),
        ]
    mesh_ms, alone_ms = meshed.inter_token_seconds * 1e3, alone.inter_token_seconds * 1e3
    added = 100 * (mesh_ms / alone_ms - 1)
    return [
        *figures,
        Figure(f"inter-token latency, {NUM_STREAMS} streams", mesh_ms, "ms", alone_ms, "engine alone"),
        Figure("inter-token latency: added by the mesh", added, "%", at_most=10.0),
    ]


def load(say: Say) -> list[Figure]:
    """Placing by load with the store, against by prefix without it."""
    from services.bench.load_policies import measure_load

    return measure_load(say)


def routing(say: Say) -> list[Figure]:
    """The router alone, in a cluster that is only told of."""
    from services.bench.routing import measure_routing

    return measure_routing(say)


def overlap(say: Say) -> list[Figure]:
    """KV that arrives while its prompt is computed."""
    from services.bench.overlap import measure_overlap

    return measure_overlap(say)


BALANCE_TITLE = (
    "Coordinator on against off, 2 prefill and 2 decode workers of --device-share 0.25: each like a slower "
    "device with a memory of its own, since two cores bound what four workers can gain"
)
AT_LEAST = {"ucx: 16 MiB, GB/s": 3.5, "shm: 16 MiB, GB/s": 8.0}
AT_MOST = {
    "ucx: 64 B round trip p50, us": 120.0,
    "ucx: idle CPU with a receive pending, percent": 1.0,
    "shm: idle CPU with a receive pending, percent": 1.0,
    "ucx: death of the peer seen after, s": 1.0,
    "shm: death of the peer seen after, s": 1.0,
}


def _links(measured: dict[str, float]) -> list[Figure]:
    """Names end in their units; UCX over tcp is held against a plain socket, shared memory against memcpy."""
    peers = {"ucx": "plain socket", "shm": "memcpy"}
    figures: list[Figure] = []
    for name, value in measured.items():
        kind, _, what = name.partition(": ")
        peer = peers.get(kind, "")
        title, _, unit = name.rpartition(", ")
        figures.append(
            Figure(
                title,
                value,
                unit,
                reference=measured.get(f"{peer}: {what}"),
                reference_name=peer,
                at_least=AT_LEAST.get(name),
                at_most=AT_MOST.get(name),
            )
        )
    return figures


def _plain(measured: dict[str, float]) -> list[Figure]:
    return [Figure(name, value, "") for name, value in measured.items()]


def store(say: Say) -> list[Figure]:
    """The KV store against the Link, and its index at millions of blocks."""
    from services.bench.store_rates import measure_store

    return measure_store(say)


def disk(say: Say) -> list[Figure]:
    """The store's tier on disk, against plain files and against RocksDB."""
    from services.bench.disk_rates import measure_disk

    return measure_disk(say)


def migration(say: Say) -> list[Figure]:
    """Modules that move while tokens flow."""
    from services.bench.migration import measure_migration

    return measure_migration(say)


def balance(say: Say) -> list[Figure]:
    """What the coordinator makes of load that is skewed."""
    from services.bench.balance import measure_balance

    return measure_balance(say)


SECTIONS = (
    Section("machine", "This machine", machine),
    Section("bus", "Bus", bus),
    Section("transport", "Links", transport),
    Section("kernels", "Kernels", kernels),
    Section("engine", "Engine alone, SmolLM2-135M in bf16", engine),
    Section("overlap", "Fetch and compute at the same time, SmolLM2-135M in bf16", overlap),
    Section("mesh", "Mesh against the engine alone", mesh),
    Section("routing", "Routing decisions, 1000 workers", routing),
    Section("load", "Placing prompts under a bursty load", load),
    Section("store", "KV store", store),
    Section("migration", "Moves of modules while 16 sequences decode, SmolLM2-135M", migration),
    Section("balance", BALANCE_TITLE, balance),
    Section("disk", "Disk tier, 64 MiB of blocks", disk),
)
