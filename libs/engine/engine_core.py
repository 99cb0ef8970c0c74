"""The engine without its thread: commands change sequences, `step` runs what the scheduler chose.

Synchronous, and owned by whoever calls it; the clock is given, so that deadlines can be tested.
"""

import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Rowwise
from contextlib import contextmanager

import msgspec
import structlog
import torch

from kernels.paged_attention.contract import PagedAttention
from libs.bus.messages.presence import WorkerLoad
from libs.cost.estimators import PrefillEstimator
from libs.cost.prefill import num_pairs
from libs.engine.attention import fitting_attention
from libs.engine.errors import BadBlocks
from libs.engine.hand_over import HandOverBudget
from libs.engine.ledger import Ledger
from libs.engine.loading import LoadingStep, LoadingSteps
from libs.engine.outputs import LayerOutput, Reservation, SequenceFailed, StepOutput, TokenOutput
from libs.engine.pool import BlockLayout, Pool
from libs.engine.ragged import RaggedBatch, Span, ragged_batch
from libs.engine.runner import Runner, leaving
from libs.engine.sampler import NOT_FINITE, Sampled, sample
from libs.engine.scheduler import Chunk, Limits, Schedule, schedule
from libs.engine.sequence import Sequence, SequenceState
from libs.engine.settings import EngineSettings, pool_blocks
from libs.model.model import Model
from libs.placement.placement import Placement, all_home
from libs.request.generation import Generation
from libs.request.outcome import FailureReason

_log = structlog.get_logger(__name__)


def _ignore_layers(outputs: list[LayerOutput]) -> None:
    """Where nobody wants KV."""


def _ignore_pause() -> None:
    """Where nothing waits for the gap between two layers."""


class EngineCore:
    """Model, pool and sequences of one worker.

    `on_layers` hears KV to hand over while a step runs; `between_layers` is called after each layer, and may
    call `write_blocks` and nothing else.
    """

    def __init__(
        self,
        model: Model,
        settings: EngineSettings,
        *,
        placement: Placement | None = None,
        attention: PagedAttention | None = None,
        clock: Callable[[], float] = time.time,
        on_layers: Callable[[list[LayerOutput]], None] = _ignore_layers,
        between_layers: Callable[[], None] = _ignore_pause,
    ) -> None:
        config = model.config
        placement = placement or all_home("home", config.num_layers, config.num_kv_heads)
        layout = BlockLayout(placement.resident_slots(), settings.block_size, config.head_dim, model.dtype)
        self.model = model
        self.settings = settings
        self.placement = placement
        self.pool = Pool(layout, pool_blocks(settings, layout.block_bytes), model.device)
        self.ledger = Ledger(
            settings,
            self.pool.num_blocks,
            fingerprint=model.fingerprint,
            vocab_size=config.vocab_size,
            eos_ids=config.eos_token_ids,
            num_layers=config.num_layers,
        )
        self.budget = HandOverBudget(settings.hand_over_bytes, layout.block_bytes)
        self._clock = clock
        self._has_just_loaded = False
        self.prefill = PrefillEstimator()
        self._has_measured = False
        self._on_layers = on_layers
        self._runner = Runner(
            model,
            self.pool,
            placement,
            attention or fitting_attention(model, self.pool.layer(0)),
            on_layers=self._layers_done,
            between_layers=between_layers,
        )
        self._loading = LoadingSteps(self.ledger, self._runner)

    def reserve(self, generation: Generation, sequence_id: str, *, whole_prompt: bool) -> Reservation | None:
        """See `Engine.reserve`."""
        return self.ledger.reserve(generation, sequence_id, whole_prompt=whole_prompt)

    def write_blocks(self, sequence_id: str, layer: int, first_block: int, blocks: torch.Tensor) -> bool:
        """KV of one layer into reserved blocks; False where the sequence does not await KV (any more).

        Blocks found by name are skipped: others read them. Raises BadBlocks for a wrong shape or place.
        """
        sequence = self.ledger.sequences.get(sequence_id)
        if sequence is None or (sequence.is_begun and not sequence.is_loading):
            return False
        if not 0 <= layer < self.model.config.num_layers:
            raise BadBlocks(f"layer {layer} of {self.model.config.num_layers} does not exist")
        kv, end = self.pool.layer(layer), first_block + len(blocks)
        if blocks.shape[1:] != kv.shape[1:] or blocks.dtype != kv.dtype:
            raise BadBlocks(
                f"blocks of shape {tuple(blocks.shape)} and {blocks.dtype}; this pool's are "
                f"{(len(blocks), *kv.shape[1:])} and {kv.dtype}"
            )
        arrivals = self.ledger.arrivals(sequence)
        if first_block < 0 or end > arrivals.end_block:
            raise BadBlocks(
                f"blocks {first_block} to {end} of {sequence_id!r}, which takes {arrivals.end_block} blocks"
            )
        if sequence.state is SequenceState.RESERVED:
            sequence.go(SequenceState.LOADING)
        start = max(first_block, sequence.num_found_blocks)
        if start < end and not (sequence.is_begun and arrivals.has(layer, start, end)):
            ids = torch.tensor(sequence.blocks[start:end], dtype=torch.int64, device=kv.device)
            with torch.inference_mode():
                kv[ids] = blocks[start - first_block :].to(kv.device)
            arrivals.add(layer, start, end)
        if sequence.is_loading and arrivals.are_complete and not self._loading.has_begun(sequence):
            self.ledger.loaded(sequence)
        return True

    def read_blocks(self, names: Rowwise[bytes]) -> torch.Tensor:
        """A copy of the longest prefix of `names` that is here.

        Shape `[n, num_layers, num_kv_heads, 2, block_size, head_dim]`, n <= len(names).
        """
        config = self.model.config
        ids = torch.tensor(self.ledger.allocator.find(names), dtype=torch.int64, device=self.model.device)
        with torch.inference_mode():
            blocks = self.pool.blocks.index_select(0, ids)
        return blocks.view(len(ids), config.num_layers, config.num_kv_heads, *blocks.shape[2:])

    def begin(
        self,
        sequence_id: str,
        *,
        num_computed_tokens: int,
        hand_over: bool = False,
        first_block: int = 0,
        awaits_kv: bool = False,
    ) -> None:
        """See `Engine.begin`."""
        self.ledger.begin(
            sequence_id,
            num_computed_tokens=num_computed_tokens,
            hand_over=hand_over,
            first_block=first_block,
            awaits_kv=awaits_kv,
        )

    def adopt(self, sequence_id: str, first: TokenOutput) -> SequenceFailed | None:
        """See `Engine.adopt`. A failure where this engine's limits end it and `first` did not say so."""
        if self.ledger.adopt(sequence_id, first) or first.finish is not None:
            return None
        detail = f"the sequence is over for this engine, whose limit is {self.ledger.max_len} tokens"
        return SequenceFailed(sequence_id, FailureReason.INTERNAL, detail)

    def abort(self, sequence_id: str) -> None:
        """Frees everything the sequence holds, from any state. Unknown ids are ignored."""
        sequence = self.ledger.sequences.get(sequence_id)
        if sequence is not None:
            self.ledger.end(sequence)

    def load(self) -> WorkerLoad:
        """What is held and to be done."""
        load = self.ledger.load(self.prefill.cost)
        if not self._has_measured:
            return load
        return msgspec.structs.replace(load, prefill_cost=self.prefill.cost)

    def fail_all(self, reason: FailureReason, detail: str) -> list[SequenceFailed]:
        """Ends every sequence, whatever it is doing."""
        return [self._fail(sequence, reason, detail) for sequence in list(self.ledger.sequences.values())]

    def next_deadline(self) -> float | None:
        """Unix seconds of the earliest deadline of all sequences."""
        sequences = self.ledger.sequences.values()
        return min((sequence.generation.deadline_unix_seconds for sequence in sequences), default=None)

    def seconds_to_deadline(self) -> float | None:
        """Until the earliest deadline, from 0 to an hour; None without sequences."""
        deadline = self.next_deadline()
        return None if deadline is None else min(max(0.0, deadline - self._clock()), 3600.0)

    def expire(self) -> list[SequenceFailed]:
        """Ends every sequence whose deadline has passed."""
        deadline, now = self.next_deadline(), self._clock()
        if deadline is None or deadline > now:
            return []
        late = [one for one in self.ledger.sequences.values() if one.generation.deadline_unix_seconds <= now]
        return [self._fail(one, FailureReason.DEADLINE, "its deadline passed in the engine") for one in late]

    def step(self) -> StepOutput:
        """One step, or as much of a loading sequence's step as its KV allows; the two take turns.

        An error inside fails the sequences of this step, and no other.
        """
        output = StepOutput(failed=self.expire())
        self._loading.forget_ended()
        self._has_just_loaded = not self._has_just_loaded and self._step_loading(output)
        if not self._has_just_loaded:
            self._step_together(output)
            if output.is_idle:
                self._has_just_loaded = self._step_loading(output)
                output.is_idle = not self._has_just_loaded
        output.stored, output.removed = self.ledger.allocator.take_changes()
        return output

    def _step_together(self, output: StepOutput) -> None:
        """A step of all whose KV is there."""
        ledger = self.ledger
        plan = schedule(ledger.by_age, self._limits(), ledger.num_freed)
        spans = ledger.apply(plan, self._clock())
        if plan.is_empty:
            # A preemption may have freed more than the scheduler could foresee: look again.
            output.is_idle = not plan.preempted
            return
        with self._failing([*plan.decodes, *(chunk.sequence for chunk in plan.chunks)], output):
            began = time.perf_counter()
            self._run(plan, spans, output)
            self._measure(plan.decodes, spans, time.perf_counter() - began)

    def _step_loading(self, output: StepOutput) -> bool:
        """Takes the oldest loading sequence that can go on as far as it can; False where none can."""
        for sequence in self.ledger.by_age:
            if not sequence.is_loading:
                continue
            with self._failing([sequence], output):
                step = self._loading.step_of(sequence, self._limits(), self._clock())
                if step is None or not step.can_advance:
                    continue
                if step.advance():
                    self._end_loading(step, output)
            return True
        return False

    def _end_loading(self, step: LoadingStep, output: StepOutput) -> None:
        began = time.perf_counter()
        self._loading.end(step)
        if step.batch is not None:
            output.num_tokens = len(step.batch.token_ids)
        self._commit([], [step.chunk], [step.span], step.batch, step.logits, output)
        if self.model.device.type == "cpu":  # elsewhere operations go on while the step is put aside
            self._measure([], [step.span], step.busy_seconds + time.perf_counter() - began)

    def _measure(self, decodes: list[Sequence], spans: list[Span], seconds: float) -> None:
        """What a step with prompts cost; a decode beside them is one more token with its context."""
        if not any(span.end > span.first for span in spans):
            return
        pairs = sum(num_pairs(span.end - span.first, span.first) for span in spans)
        pairs += sum(num_pairs(1, sequence.num_computed) for sequence in decodes)
        num_tokens = len(decodes) + sum(span.end - span.first for span in spans)
        self.prefill.observe_batch(num_tokens, pairs, seconds)
        self._has_measured = True

    @contextmanager
    def _failing(self, sequences: list[Sequence], output: StepOutput) -> Generator[None]:
        """For what runs the model: whatever breaks it, its sequences are told, those that have not ended."""
        try:
            with torch.inference_mode():
                yield
        except Exception as error:  # noqa: BLE001 - the boundary of a step
            _log.exception("engine_step_failed", num_sequences=len(sequences))
            live = [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]
            detail = f"{type(error).__name__}: {error}"
            output.failed += [self._fail(sequence, FailureReason.INTERNAL, detail) for sequence in live]

    def _limits(self) -> Limits:
        return Limits(
            block_size=self.settings.block_size,
            max_num_seqs=self.settings.num_step_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            num_free_blocks=self.ledger.allocator.num_free,
            num_hand_over_blocks=max(0, self.budget.num_blocks - self._loading.num_leaving_blocks),
        )

    def _run(self, plan: Schedule[Sequence], spans: list[Span], output: StepOutput) -> None:
        full = [span for span in spans if span.end > span.first]
        hand_overs = leaving(plan.chunks)
        batch: RaggedBatch | None = None
        logits: torch.Tensor | None = None
        if plan.decodes or full:
            batch = ragged_batch(self.ledger.rows, plan.decodes, full, self.settings.block_size)
            logits = self._runner.run(batch, hand_overs)
            output.num_tokens = len(batch.token_ids)
        else:
            self._runner.copy_out(hand_overs)
        self._commit(plan.decodes, plan.chunks, spans, batch, logits, output)

    def _commit(
        self,
        decodes: list[Sequence],
        chunks: list[Chunk[Sequence]],
        spans: list[Span],
        batch: RaggedBatch | None,
        logits: torch.Tensor | None,
        output: StepOutput,
    ) -> None:
        """What a step computed becomes part of its sequences: KV, and the next token where one is chosen."""
        ledger, sampled = self.ledger, None
        chosen = [*decodes, *(span.sequence for span in spans if span.end > span.first and span.wants_token)]
        if batch is not None and logits is not None:
            sampled = sample(logits, ledger.rows, batch.rows, chosen)
            ledger.rows.append(batch.rows, sampled.token_ids)
        for sequence in decodes:
            ledger.computed(sequence, sequence.num_tokens)
        for chunk, span in zip(chunks, spans, strict=True):
            chunk.sequence.num_handed_blocks += chunk.num_handed_blocks
            ledger.computed(span.sequence, span.end)
        if sampled is not None:
            self._take_tokens(chosen, sampled, output)

    def _take_tokens(self, chosen: list[Sequence], sampled: Sampled, output: StepOutput) -> None:
        for index, (sequence, token_id) in enumerate(zip(chosen, sampled.token_ids.tolist(), strict=True)):
            if token_id == NOT_FINITE:
                output.failed.append(
                    self._fail(sequence, FailureReason.INTERNAL, "the model's logits are NaN")
                )
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
                self.ledger.end(sequence)

    def _layers_done(self, outputs: list[LayerOutput]) -> None:
        for one in outputs:
            self.budget.take(one)
        self._on_layers(outputs)

    def _fail(self, sequence: Sequence, reason: FailureReason, detail: str) -> SequenceFailed:
        self.ledger.end(sequence)
        return SequenceFailed(sequence.id, reason, detail)
