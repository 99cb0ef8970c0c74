"""What a step computed becomes part of its sequences: KV, and the next token where one is chosen."""

import torch

from libs.engine.forward.ragged import RaggedBatch
from libs.engine.outputs import StepOutput, TokenOutput
from libs.engine.sampling.sampler import NOT_FINITE, Sampled, sample
from libs.engine.scheduling.scheduler import Chunk
from libs.engine.scheduling.sequence import Sequence, Span
from libs.engine.scheduling.sequence_table import SequenceTable
from libs.request.outcome import FailureReason


def commit(
    table: SequenceTable,
    decodes: list[Sequence],
    chunks: list[Chunk[Sequence]],
    spans: list[Span],
    batch: RaggedBatch | None,
    logits: torch.Tensor | None,
    output: StepOutput,
) -> None:
    """Tokens and ends go to `output`."""
    sampled = None
    chosen = [*decodes, *(span.sequence for span in spans if span.end > span.first and span.wants_token)]
    if batch is not None and logits is not None:
        sampled = sample(logits, table.rows, batch.rows, chosen)
        table.rows.append(batch.rows, sampled.token_ids)
    for sequence in decodes:
        table.computed(sequence, sequence.num_tokens)
    for chunk, span in zip(chunks, spans, strict=True):
        chunk.sequence.num_handed_blocks += chunk.num_handed_blocks
        table.computed(span.sequence, span.end)
    if sampled is not None:
        _take_tokens(table, chosen, sampled, output)


def _take_tokens(table: SequenceTable, chosen: list[Sequence], sampled: Sampled, output: StepOutput) -> None:
    for index, (sequence, token_id) in enumerate(zip(chosen, sampled.token_ids.tolist(), strict=True)):
        if token_id == NOT_FINITE:
            reason, detail = FailureReason.INTERNAL, "the model's logits are NaN"
            output.failed.append(table.fail(sequence, reason, detail))
            continue
        finish = sequence.append(token_id)
        token = TokenOutput(
            sequence.id,
            sequence.num_output_tokens - 1,
            token_id,
            sampled.logprobs.get(index),
            finish,
            sequence.num_cached_tokens if sequence.is_first_token else 0,
            sequence.prefill_started_unix_seconds if sequence.is_first_token else 0.0,
        )
        sequence.is_first_token = False
        (output.prompts_done if sequence.hand_over else output.tokens).append(token)
        if finish is not None or sequence.hand_over:
            table.end(sequence)
