"""Settings of a worker, whatever its role."""

from typing import Annotated, Literal

from msgspec import Meta

from libs.model.source import DEFAULT_MODEL
from libs.runtime.settings import RuntimeSettings

RoleSetting = Annotated[
    Literal["prefill", "decode", "both"],
    Meta(
        description="prefill: runs prompts and hands their KV over; decode: generates with such KV; both: "
        "generates, and runs the prompts itself. `kvmesh role` changes it"
    ),
]


class WorkerSettings(RuntimeSettings, frozen=True, kw_only=True):
    """Settings of a process that runs the model."""

    role: RoleSetting = "both"
    model: Annotated[
        str, Meta(description="a GGUF file, a Hugging Face directory, or the name of a model", min_length=1)
    ] = DEFAULT_MODEL
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="precision; auto: bfloat16 where the device computes in it, else float32"),
    ] = "auto"
    device: Annotated[
        str, Meta(description="auto: CUDA where there is one; cpu, cuda, cuda:1", min_length=1)
    ] = "auto"
    max_model_len: Annotated[
        int, Meta(description="tokens of prompt and output together; 0: what the model was made for", ge=0)
    ] = 0
    block_size: Annotated[int, Meta(description="tokens of one KV block", ge=1, le=1024)] = 16
    kv_memory_gib: Annotated[float, Meta(description="memory for KV blocks, in GiB", gt=0)] = 1.0
    num_blocks: Annotated[int, Meta(description="KV blocks; 0: as many as kv_memory_gib holds", ge=0)] = 0
    max_num_seqs: Annotated[int, Meta(description="sequences in one step", ge=1)] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(description="tokens in one step; longer prompts run in chunks", ge=1)
    ] = 2048
    threads: Annotated[int, Meta(description="CPU threads of one operation; 0: torch's choice", ge=0)] = 0
    transport: Annotated[
        Literal["auto", "ucx", "shm"],
        Meta(description="how KV travels; auto: shared memory within a host, UCX between hosts"),
    ] = "auto"
    link_host: Annotated[str, Meta(description="where Links listen", min_length=1)] = "127.0.0.1"
    lease_seconds: Annotated[
        float,
        Meta(description="a decode worker frees what its prefill worker is silent about for longer", gt=0),
    ] = 10.0
    max_waiting: Annotated[
        int, Meta(description="prompts to hand over that may be here, waiting or running", ge=1)
    ] = 512
    max_held: Annotated[
        int, Meta(description="sequences to generate that may be here, running or awaited", ge=1)
    ] = 1024
    connect_timeout_seconds: Annotated[
        float, Meta(description="a decode worker that does not answer a Link in time is given up", gt=0)
    ] = 2.0
    send_timeout_seconds: Annotated[
        float, Meta(description="a decode worker that takes a frame no faster is given up", gt=0)
    ] = 10.0
    store_find_timeout_seconds: Annotated[
        float, Meta(description="a KV store that answers no faster holds nothing", gt=0)
    ] = 0.25
    store_fetch_timeout_seconds: Annotated[
        float, Meta(description="a prefix that arrives no faster is computed", gt=0)
    ] = 2.0
    store_fetch_when: Annotated[
        Literal["faster", "always"],
        Meta(
            description="faster: not what is computed sooner; always: whatever it costs, within the timeouts"
        ),
    ] = "faster"
    store_put_mib: Annotated[
        int, Meta(description="KV kept for the KV stores until it is sent; what exceeds it is not put", ge=0)
    ] = 256
    store_finished: Annotated[
        bool, Meta(description="whether the KV of finished sequences goes to the KV stores")
    ] = True
    max_unsent_deltas: Annotated[
        int, Meta(description="token deltas kept for gateways while the broker is away", ge=1)
    ] = 65536
    device_share: Annotated[
        float,
        Meta(description="busy seconds of the device per second, own and hosted", gt=0, le=1),
    ] = 1.0
    hosting: Annotated[bool, Meta(description="whether modules of other workers' instances may run here")] = (
        True
    )
    hosting_timeout_seconds: Annotated[
        float, Meta(description="a worker that runs modules for this one and answers no faster is lost", gt=0)
    ] = 10.0
    move_deadline_seconds: Annotated[
        float, Meta(description="modules not back by then stay where they are, as when their host ends", gt=0)
    ] = 60.0
    move_bandwidth_mib: Annotated[
        float, Meta(description="MiB per second that a move copies at most; 0: as fast as it goes", ge=0)
    ] = 0.0
