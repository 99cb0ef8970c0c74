"""What the simulator expects of the coordinator under the same load, with busy seconds as measured."""

from libs.simulator.balance_compare import compare_balancing
from libs.simulator.settings import SimulatorSettings
from services.bench.balance_load import Seen

BLOCK_BYTES = 30 * 3 * 2 * 16 * 64 * 2
"""SmolLM2-135M in bfloat16."""
FASTER = 2.0
"""Requests come so many times as fast as the mesh without moves answers them: enough of them always wait."""


def predicted_gain(
    long_prompts: Seen, long_answers: Seen, *, device_share: float, num_blocks: int, max_step_tokens: int
) -> float:
    """Throughput with the loop on over off, from phases that ran without moves."""
    phases = (long_prompts, long_answers)
    seconds = sum(one.phase.seconds for one in phases)
    num_requests = 2 * round(min(one.num_answer_tokens / one.phase.output_tokens for one in phases))
    settings = SimulatorSettings(
        balance=True,
        policy=("least_load",),
        requests=max(2, num_requests),
        requests_per_second=FASTER * max(2, num_requests) / seconds,
        prefix_tokens=long_prompts.phase.prompt_tokens,
        output_tokens=long_answers.phase.output_tokens,
        prefill=2,
        decode=2,
        stores=0,
        block_size=16,
        block_bytes=BLOCK_BYTES,
        layers=30,
        max_num_batched_tokens=max_step_tokens,
        prefill_blocks=num_blocks,
        decode_blocks=num_blocks,
        step_seconds=1e-3,
        token_seconds=long_prompts.busy_seconds("prefill", of_steps=False),
        pair_seconds=1e-12,
        decode_step_seconds=long_answers.busy_seconds("decode", of_steps=True),
        decode_sequence_seconds=0.0,
        decode_token_seconds=0.0,
        device_share=device_share,
    )
    off, on = compare_balancing(settings)
    return on.tokens_per_second / off.tokens_per_second
