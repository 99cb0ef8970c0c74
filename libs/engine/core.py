"""The engine without its thread: commands change its parts, `step` runs what the scheduler chose.

Synchronous, and owned by whoever calls it; the clock is given, so that deadlines can be tested.
"""

import time
from collections.abc import Callable, Collection, Generator
from collections.abc import Sequence as Rowwise
from contextlib import contextmanager

import msgspec
import numpy as np
import structlog
import torch

from kernels.paged_attention.contract import PagedAttention
from libs.cost.estimators import PrefillEstimator
from libs.cost.load import WorkerLoad
from libs.cost.prefill import num_pairs
from libs.engine.attention import fitting_attention
from libs.engine.forward.loading import Incoming, LoadingStep, LoadingSteps
from libs.engine.forward.ragged import RaggedBatch, ragged_batch
from libs.engine.forward.remote_kv import Hosts, Wait, WholeKv, result_now
from libs.engine.forward.runner import HandOverBudget, Runner, leaving
from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.port import HostLost
from libs.engine.memory.pool import BlockLayout, Pool
from libs.engine.meter import Meter
from libs.engine.migration.layout import KvLayout
from libs.engine.migration.migrator import Migrator
from libs.engine.outputs import LayerOutput, SequenceFailed, StepOutput
from libs.engine.sampling.commit import commit
from libs.engine.scheduling.scheduler import Chunk, Limits, Schedule, schedule
from libs.engine.scheduling.sequence import Sequence, SequenceState, Span
from libs.engine.scheduling.sequence_table import SequenceTable
from libs.engine.settings import EngineSettings, pool_blocks
from libs.model.layer import layer_bytes
from libs.model.model import Model
from libs.placement.placement import Placement, all_at_owner
from libs.request.outcome import FailureReason

_log = structlog.get_logger(__name__)


def _ignore_layers(outputs: list[LayerOutput]) -> None:
    """Where nobody wants KV."""


def _ignore_pause() -> None:
    """Where nothing waits for the gap between two layers."""


def _ignore_placement(placement: Placement, lost: str) -> None:
    """Where nobody moves anything."""


class EngineCore:
    """One worker's engine in parts: commands call `sequences`, `incoming`, `migrator` and `hosted` directly.

    `on_layers` hears KV to hand over while a step runs; `between_layers` is called after each layer, and may
    call `incoming.write` and `migrator.copy_in_step` and run pieces of `hosted`, nothing else. `wait`, which
    waits for hosts, may do the first and the last of these; `waiting` measures that time.
    """

    def __init__(
        self,
        model: Model,
        settings: EngineSettings,
        *,
        home: str = "home",
        attention: PagedAttention | None = None,
        clock: Callable[[], float] = time.time,
        on_layers: Callable[[list[LayerOutput]], None] = _ignore_layers,
        between_layers: Callable[[], None] = _ignore_pause,
        on_placement: Callable[[Placement, str], None] = _ignore_placement,
        wait: Wait = result_now,
        waiting: Meter | None = None,
    ) -> None:
        config = model.config
        placement = all_at_owner(home, config.num_layers, config.num_kv_heads)
        layout = BlockLayout(placement.resident_slots(), settings.block_size, config.head_dim, model.dtype)
        self.settings = settings
        self.pool = _pool(model, settings, layout)
        self.sequences = SequenceTable(
            settings,
            self.pool.num_blocks,
            fingerprint=model.fingerprint,
            vocab_size=config.vocab_size,
            eos_ids=config.eos_token_ids,
            num_layers=config.num_layers,
        )
        self.budget = HandOverBudget(settings.hand_over_bytes, layout.block_bytes)
        self.prefill = PrefillEstimator()
        self._clock = clock
        self._has_just_loaded = self._has_measured = False
        self._on_layers = on_layers
        self._kv = WholeKv(self.pool, Hosts(wait, waiting or Meter()), placement)
        self._runner = Runner(
            model,
            self.pool,
            self._kv,
            attention or fitting_attention(model, self.pool.layer(0)),
            on_layers=self._layers_done,
            between_layers=between_layers,
        )
        self._loading = LoadingSteps(self.sequences, self._runner)
        layout_now = KvLayout(self.pool, self.sequences, self._kv, self._runner, self._loading)
        self.hosted = HostedModules(
            model,
            self.pool,
            lambda kv: fitting_attention(self.model, kv),  # of the model as it is then: layers may have left
            min_own_blocks=layout_now.min_blocks,
            resize_own=layout_now.resize,
            worker=placement.owner,
        )
        self.migrator = Migrator(layout_now, self.hosted, on_placement)
        self.incoming = Incoming(self.sequences, self._loading, self._kv, layout, self.migrator.wrote)

    @property
    def model(self) -> Model:
        """Less the layers whose weights are away."""
        return self._runner.model

    @property
    def placement(self) -> Placement:
        """Where everything is."""
        return self._kv.placement

    def read_blocks(self, names: Rowwise[bytes]) -> torch.Tensor:
        """A copy of the longest prefix of `names` that is here, as `Engine.read_blocks`. Raises HostLost."""
        config = self.model.config
        ids = np.array(self.sequences.allocator.find(names), dtype=np.int64)
        with self.migrator.losing_hosts():
            blocks = self._kv.read(range(config.num_layers), ids)
        return blocks.view(len(ids), config.num_layers, config.num_kv_heads, *blocks.shape[2:])

    def load(self) -> WorkerLoad:
        """What is held and to be done."""
        load = self.sequences.load(self.prefill.cost)
        if not self._has_measured:
            return load
        return msgspec.structs.replace(load, prefill_cost=self.prefill.cost)

    def fail_all(self, reason: FailureReason, detail: str) -> list[SequenceFailed]:
        """Ends every sequence, whatever it is doing."""
        sequences = list(self.sequences.by_id.values())
        return self.migrator.take_failed() + [
            self.sequences.fail(sequence, reason, detail) for sequence in sequences
        ]

    def seconds_to_deadline(self) -> float | None:
        """Until the earliest deadline, from 0 to an hour; None without sequences."""
        deadline = self.sequences.next_deadline()
        return None if deadline is None else min(max(0.0, deadline - self._clock()), 3600.0)

    def step(self) -> StepOutput:
        """One step, or as much of a loading sequence's step as its KV allows; the two take turns.

        An error inside fails the sequences of this step, and no other.
        """
        output = StepOutput(failed=self.sequences.expire(self._clock()) + self.migrator.take_failed())
        self._loading.forget_ended()
        self.migrator.give_back_blocks()
        self._has_just_loaded = not self._has_just_loaded and self._step_loading(output)
        if not self._has_just_loaded:
            self._step_together(output)
            if output.is_idle:
                self._has_just_loaded = self._step_loading(output)
                output.is_idle = not self._has_just_loaded
        self.migrator.settle_lost()
        output.failed += self.migrator.take_failed()
        output.stored, output.removed = self.sequences.allocator.take_changes()
        self._loading.is_paused = False  # who still wants it asks for it again
        return output

    def _step_together(self, output: StepOutput) -> None:
        """A step of all whose KV is there."""
        sequences = self.sequences
        plan = schedule(sequences.by_age, self._limits(), sequences.num_freed)
        spans = sequences.apply(plan, self._clock())
        if plan.is_empty:
            # A preemption may have freed more than the scheduler could foresee: look again.
            output.is_idle = not plan.preempted
            return
        cut = [chunk.sequence for chunk in plan.chunks if chunk.num_handed_blocks]
        with self._failing([*plan.decodes, *(chunk.sequence for chunk in plan.chunks)], output, cut):
            began = time.perf_counter()
            self._run(plan, spans, output)
            self._measure(plan.decodes, spans, time.perf_counter() - began)

    def _step_loading(self, output: StepOutput) -> bool:
        """Takes the oldest loading sequence that can go on as far as it can; False where none can."""
        for sequence in self.sequences.by_age:
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
    def _failing(
        self, sequences: list[Sequence], output: StepOutput, cut: Collection[Sequence] = ()
    ) -> Generator[None]:
        """For what runs the model: whatever breaks it, its sequences are told, those that have not ended.

        A lost host breaks more than them, and is no fault of theirs: most go on.
        """
        try:
            with torch.inference_mode():
                yield
        except HostLost as lost:
            _log.warning("engine_lost_host", worker=lost.worker, reason=str(lost))
            if not any(placed.worker == lost.worker for placed in self.placement.placed):
                output.failed += self._fail_live(sequences, FailureReason.PEER_LOST, str(lost))
            self.migrator.lose_host(lost.worker, lost.why, cut)
        except Exception as error:  # noqa: BLE001 - the boundary of a step
            _log.exception("engine_step_failed", num_sequences=len(sequences))
            detail = f"{type(error).__name__}: {error}"
            output.failed += self._fail_live(sequences, FailureReason.INTERNAL, detail)

    def _fail_live(
        self, sequences: list[Sequence], reason: FailureReason, detail: str
    ) -> list[SequenceFailed]:
        live = [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]
        return [self.sequences.fail(sequence, reason, detail) for sequence in live]

    def _limits(self) -> Limits:
        return Limits(
            block_size=self.settings.block_size,
            max_num_seqs=self.settings.num_step_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            num_free_blocks=self.sequences.allocator.num_free,
            num_hand_over_blocks=max(0, self.budget.num_blocks - self._loading.num_leaving_blocks),
        )

    def _run(self, plan: Schedule[Sequence], spans: list[Span], output: StepOutput) -> None:
        full = [span for span in spans if span.end > span.first]
        hand_overs = leaving(plan.chunks)
        batch: RaggedBatch | None = None
        logits: torch.Tensor | None = None
        if plan.decodes or full:
            batch = ragged_batch(self.sequences.rows, plan.decodes, full, self.settings.block_size)
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
        if batch is not None and self.migrator.is_under_way:
            self.migrator.wrote(np.unique(batch.slots // self.settings.block_size).tolist())
        commit(self.sequences, decodes, chunks, spans, batch, logits, output)

    def _layers_done(self, outputs: list[LayerOutput]) -> None:
        for one in outputs:
            self.budget.take(one)
        self._on_layers(outputs)


def _pool(model: Model, settings: EngineSettings, layout: BlockLayout) -> Pool:
    """With room to grow by the weights of layers that leave."""
    num_blocks = pool_blocks(settings, layout.block_bytes)
    weights = sum(layer_bytes(layer) for layer in model.weights.layers.values())
    return Pool(layout, num_blocks, model.device, max_bytes=num_blocks * layout.block_bytes + weights)
