"""Modules of other workers' instances that this worker runs, in memory that its own pool gave up.

An owner's calls are done in order, piece by piece, a piece being one layer, so that own steps and other
owners come in between. What breaks a call breaks all that the owner has here: each answer after it fails,
until the owner opens its modules anew. Other owners go on.
"""

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace as replaced

import structlog
import torch

from kernels.paged_attention.contract import PagedAttention
from libs.engine.errors import EngineError, MoveRefused, NoRoom
from libs.engine.hosting.calls import HostedCall, move_id_of
from libs.engine.hosting.hosted_calls import HostedCalls
from libs.engine.hosting.owner import HostedKv, HostedModule, Owner
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.memory.arena import Region
from libs.engine.memory.pool import BlockLayout, Pool
from libs.model.errors import ModelError
from libs.model.model import Layer, Model
from libs.placement.module import Module, ModuleKind
from libs.placement.placement import BadPlacement, HostedModuleStatus, all_at_owner, check_module

_MIB = 1 << 20
_MAX_CALLS = 4096  # of one owner, not begun: it waits for answers, so it has far fewer

AttentionFactory = Callable[[torch.Tensor], PagedAttention]
"""The attention that fits one layer of a cache, `[num_blocks, heads, 2, block_size, head_dim]`, not in use
yet."""

_log = structlog.get_logger(__name__)


class HostedModules:
    """The hosted modules of one engine, by owner. Belongs to the engine's thread, but for `put`.

    `model` is the host's own, which lends its weights to owners with the same model; replace it when layers
    leave it or come back. `min_own_blocks` and `resize_own` are those of the host's `KvLayout`. `worker`
    names this host in errors.
    """

    def __init__(
        self,
        model: Model,
        pool: Pool,
        attention_factory: AttentionFactory,
        *,
        min_own_blocks: Callable[[], int],
        resize_own: Callable[[int | None], None],
        worker: str = "host",
    ) -> None:
        self.model = model
        self.pool = pool
        self._min_own_blocks, self._resize_own = min_own_blocks, resize_own
        self._attention_factory = attention_factory
        self._worker = worker
        self._owners: dict[str, Owner] = {}
        self._hosted: tuple[HostedModuleStatus, ...] = ()
        self._lock = threading.Lock()
        """Guards which owners there are, and the beginning of their queues."""
        self._calls = HostedCalls(
            model.config, block_size=pool.layout.block_size, dtype=model.dtype, device=model.device
        )

    @property
    def num_bytes(self) -> int:
        """Memory that all of them take, KV and weights; from any thread."""
        return sum(one.num_bytes for one in self._hosted)

    def hosted(self) -> tuple[HostedModuleStatus, ...]:
        """What is here; from any thread."""
        return self._hosted

    @property
    def own_layers_in_use(self) -> frozenset[int]:
        """Layers whose weights owners use and the host's own model holds."""
        return frozenset(
            layer
            for owner in self._owners.values()
            for one in owner.modules.values()
            if one.uses_own_weights
            for layer in one.module.layers
        )

    def open(
        self,
        owner: str,
        move_id: str,
        module: Module,
        *,
        num_blocks_wanted: int,
        num_blocks_least: int,
        layers: Mapping[int, Layer] | None = None,
        weight_bytes: int = 0,
    ) -> int:
        """Makes room for a module; returns how many blocks it has.

        LAYERS run with `layers`, whose `weight_bytes` count as taken here; they may come into the mapping
        later, before the first call that needs them. Without `layers` they run with own weights.

        Raises:
            MoveRefused: the model has no such module, its weights are not here, or the id is in use.
            NoRoom: fewer than `num_blocks_least` can be spared.
            NotYet: from the own pool; nothing was changed.
        """
        known = self._owners.get(owner)
        if known is not None and move_id in known.modules:
            raise MoveRefused(f"a module that move {move_id!r} brought is here already")
        model = self._hosted_model(module, layers)
        config = self.model.config
        layout = BlockLayout(
            module.slots(config.num_kv_heads), self.pool.layout.block_size, config.head_dim, self.model.dtype
        )
        granted = self._grant(layout.block_bytes, weight_bytes, num_blocks_wanted, num_blocks_least)
        region = self._take(granted * layout.block_bytes + weight_bytes)
        kv = HostedKv(layout, granted, region.memory)
        with torch.inference_mode():
            attention = self._attention_factory(kv.layer(module.first_layer))
        here = HostedModule(
            move_id, module, kv, region, attention, model, model is not None and layers is None
        )
        with self._lock:
            self._owners.setdefault(owner, Owner(owner)).modules[move_id] = here
        self._note_hosted()
        return granted

    def touch(self, owner: str, move_id: str) -> None:
        """Takes the pages of a module's KV, which its first steps would have to wait for; from any thread."""
        known = self._owners.get(owner)
        if known is not None and (one := known.modules.get(move_id)) is not None:
            self.pool.touch(one.region, one.kv.num_blocks * one.kv.layout.block_bytes)

    def close(self, owner: str, move_id: str) -> None:
        """Frees a module; the own pool gets its memory. Idempotent. Raises NotYet: ask again."""
        known = self._owners.get(owner)
        if known is not None:
            one = known.modules.pop(move_id, None)
            if one is not None:
                self._stop_using(known, one)
                self.pool.take_back(one.region)
            if not known.modules:
                self._forget(known, "its modules were closed")
        self._note_hosted()
        self._resize_own(None)

    def close_owner(self, owner: str) -> None:
        """Frees all that an owner has here, and fails what it waits for. Idempotent.

        Raises NotYet: ask again.
        """
        known = self._owners.get(owner)
        if known is not None:
            for one in known.modules.values():
                self.pool.take_back(one.region)
            self._forget(known, "it was closed")
        self._note_hosted()
        self._resize_own(None)

    def end(self, why: str) -> None:
        """Nothing runs here any more; whoever waits hears why."""
        for owner in list(self._owners.values()):
            self._forget(owner, why)

    def put(self, owner: str, call: HostedCall, answer: Answer) -> None:
        """Queues a call; from any thread, never waits."""
        with self._lock:
            known = self._owners.get(owner)
            if known is not None and len(known.calls) < _MAX_CALLS:
                known.calls.append((call, answer))
                return
            why = "no module of this owner is here" if known is None else f"{_MAX_CALLS} calls wait already"
            error = HostLost(self._worker, why)
            if known is not None:
                known.overrun = error
        answer.fail(error)

    @property
    def has_work(self) -> bool:
        """Whether an owner has something to run."""
        return any(owner.is_ready for owner in self._owners.values())

    def ready(self) -> list[str]:
        """Guests that have something to run."""
        return [name for name, owner in self._owners.items() if owner.is_ready]

    def run_piece(self, name: str) -> None:
        """Runs the owner's next call, or goes on with it, up to the end of a layer."""
        owner = self._owners.get(name)
        if owner is None or not owner.is_ready:
            return
        if owner.under_way is None:
            call, owner.awaited = owner.calls.popleft()
            owner.under_way = self._under_way(owner, call, owner.awaited)
        with torch.inference_mode():
            if next(owner.under_way, self) is self:
                owner.under_way = owner.awaited = owner.busy_with = None

    def run_all(self) -> None:
        """Everything that was asked so far."""
        while names := self.ready():
            for name in names:
                self.run_piece(name)

    def _under_way(self, owner: Owner, call: HostedCall, answer: Answer) -> Generator[None]:
        owner.error = owner.error or owner.overrun
        if owner.error is not None:
            answer.fail(owner.error)
            return
        try:
            result = yield from self._calls.run(owner, call)
        except Exception as error:  # noqa: BLE001 - the boundary of an owner: it is told, and others go on
            expected = isinstance(error, EngineError)
            _log.warning(
                "hosted_call_failed", owner=owner.name, call=type(call).__name__, exc_info=not expected
            )
            owner.error = HostLost(self._worker, f"{type(call).__name__}: {error}")
            answer.fail(owner.error)
        else:
            answer.give(result)

    def _hosted_model(self, module: Module, layers: Mapping[int, Layer] | None) -> Model | None:
        """A model with the module's layers alone, so that it keeps no others alive."""
        config = self.model.config
        try:
            check_module(all_at_owner("owner", config.num_layers, config.num_kv_heads), module)
            if module.kind is not ModuleKind.LAYERS:
                return None
            if layers is None:
                layers = {layer: self.model.layer(layer) for layer in module.layers}
        except (BadPlacement, ModelError) as error:
            raise MoveRefused(f"{error}") from error
        weights = replaced(self.model.weights, layers=layers)
        return Model(config, weights, fingerprint=self.model.fingerprint)

    def _grant(self, block_bytes: int, weight_bytes: int, requested: int, minimum: int) -> int:
        """As many blocks as can be spared, at most `requested`. Raises NoRoom below `minimum`."""
        min_own, layout = self._min_own_blocks(), self.pool.layout
        minimum = max(1, minimum)
        requested = min(requested, self.pool.num_bytes // block_bytes)  # the asker's number may be any

        def is_too_much(num_blocks: int) -> bool:
            num_bytes = num_blocks * block_bytes + weight_bytes
            return self.pool.capacity(layout, num_given_up_bytes=num_bytes) < min_own

        granted = bisect_left(range(1, requested + 1), True, key=is_too_much)
        if granted < minimum:
            weights = f" beside {weight_bytes / _MIB:.1f} MiB of weights" if weight_bytes else ""
            raise NoRoom(
                f"{granted} blocks of {block_bytes} bytes are free at the host{weights}, {minimum} are "
                f"asked for; {self._usage_text(min_own)}: wait until fewer sequences run there, bring home "
                "what it hosts, choose another, or start it with a lower --max-model-len or more KV memory"
            )
        return granted

    def _usage_text(self, min_own: int) -> str:
        """What this worker's memory is needed for."""
        own = f"its own sequences need {min_own} of its {self.pool.num_blocks} blocks"
        others = f", and modules of others have {self.num_bytes / _MIB:.1f} MiB there" if self._hosted else ""
        return f"{own} (those that run now, and room for one of full length){others}"

    def _take(self, num_bytes: int) -> Region:
        left = self.pool.capacity(self.pool.layout, num_given_up_bytes=num_bytes)
        if left < self.pool.num_blocks:
            self._resize_own(left)
        return self.pool.give_up(num_bytes)

    def _note_hosted(self) -> None:
        self._hosted = tuple(
            HostedModuleStatus(
                move_id=one.move_id,
                owner=owner.name,
                module=one.module,
                num_blocks=one.kv.num_blocks,
                num_bytes=one.region.num_bytes,
            )
            for owner in self._owners.values()
            for one in owner.modules.values()
        )

    def _stop_using(self, owner: Owner, closed: HostedModule) -> None:
        """Its memory is another's from now on: a call that paused within it cannot go on. Those that are
        queued for it are none of the other modules' harm."""
        with self._lock:
            queued = owner.calls
            owner.calls = deque(one for one in queued if move_id_of(one[0]) != closed.move_id)
        for answer in [answer for call, answer in queued if move_id_of(call) == closed.move_id]:
            answer.fail(HostLost(self._worker, f"the module of {closed.move_id!r} was closed"))
        if owner.busy_with is closed and owner.awaited is not None:
            owner.error = HostLost(self._worker, f"the module of {closed.move_id!r} was closed under a call")
            owner.awaited.fail(owner.error)
            owner.under_way = owner.awaited = owner.busy_with = None

    def _forget(self, owner: Owner, why: str) -> None:
        owner.modules.clear()
        with self._lock:
            self._owners.pop(owner.name, None)
            waiting = [answer for _, answer in owner.calls]
            owner.calls.clear()
        if owner.awaited is not None:
            waiting.append(owner.awaited)
        owner.under_way = owner.awaited = owner.busy_with = None
        for answer in waiting:
            answer.fail(HostLost(self._worker, why))
