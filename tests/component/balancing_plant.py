"""A mesh that obeys the control loop: demands in, loads out; moves do what was predicted, with noise."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec

from libs.balancing.decide import decide
from libs.balancing.device_model import (
    ATTENTION_SHARE,
    capacity,
    module_block_bytes,
    predict_outbound,
    usable_bytes,
)
from libs.balancing.settings import BalancingSettings
from libs.balancing.state import LoopState
from libs.balancing.view import (
    Decision,
    Device,
    Flip,
    Inbound,
    MeshView,
    Outbound,
    RoundReport,
    UnderWay,
    reported_load,
)
from libs.cost.migration import ModelShape
from libs.placement.migration import new_move_id
from libs.placement.module import Module, ModuleKind
from libs.placement.placement import PlacedModule, all_at_owner
from libs.placement.role import Role

ROUND_SECONDS = 0.5
MOVE_ROUNDS = 4
MEMORY_BYTES = 1 << 28
START_UNIX_SECONDS = 1_700_000_000.0

SHAPE = ModelShape(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    element_bytes=4,
    layer_weight_bytes=14_000_000,
    layer_memory_bytes=28_000_000,
    block_size=16,
)
NUM_BLOCKS = MEMORY_BYTES // SHAPE.block_bytes


def device(worker: str, role: Role = Role.DECODE, shape: ModelShape = SHAPE, **facts: Any) -> Device:
    """An idle worker, but for what is told."""
    num_blocks = MEMORY_BYTES // shape.block_bytes
    known: dict[str, Any] = {
        "device_share": 0.25,
        "num_used_blocks": 0,
        "num_blocks": num_blocks,
        **dict.fromkeys(("busy_share", "hosted_busy_share", "away_share", "queued_seconds"), 0.0),
        **facts,
    }
    reported = {
        name: known.pop(name) for name in ("busy_share", "hosted_busy_share", "away_share", "queued_seconds")
    }
    shares = {name: known[name] for name in ("device_share", "num_used_blocks", "num_blocks")}
    busy, hosted = reported["busy_share"], reported["hosted_busy_share"]
    idle = Device(
        worker=worker,
        name=worker,
        role=role,
        fingerprint="model",
        can_host=True,
        shape=shape,
        placement=all_at_owner(worker, shape.num_layers, shape.num_kv_heads),
        load=reported_load(**reported, **shares),
        device_share=0.25,
        hosted_part=min(1.0, hosted / busy) if busy else 0.0,
        tokens_per_second=100.0,
        num_running=8,
        memory_bytes=MEMORY_BYTES,
        hosted_bytes=0,
        num_blocks=num_blocks,
        num_used_blocks=0,
        num_least_blocks=num_blocks // 16,
    )
    return replace(idle, **known)


@dataclass
class Demand:
    """What users want of an instance: work in shares of one device, and of its memory when all is home."""

    work: float = 0.05
    memory: float = 0.05


@dataclass
class Moving:
    decision: Outbound | Inbound
    move_id: str
    rounds_left: int


@dataclass
class Plant:
    """Two workers of each role, unless told."""

    settings: BalancingSettings = field(default_factory=BalancingSettings)
    seed: int = 0
    noise: float = 0.0
    num_prefill: int = 2
    num_decode: int = 2
    on_decision: Callable[["Plant", MeshView, LoopState, Decision], None] = lambda *_: None

    def __post_init__(self) -> None:
        roles = [("prefill", Role.PREFILL)] * self.num_prefill + [("decode", Role.DECODE)] * self.num_decode
        self.devices = {
            f"{name}-{number}": device(f"{name}-{number}", role) for number, (name, role) in enumerate(roles)
        }
        self.demands = {worker: Demand() for worker in self.devices}
        self.random = Random(self.seed)
        self.state, self.now = LoopState(), START_UNIX_SECONDS
        self.moving: list[Moving] = []
        self.switched_at: dict[str, float] = {}
        self.decisions: list[tuple[float, Outbound | Inbound | Flip]] = []
        self.rounds: list[RoundReport] = []

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.round()

    def round(self) -> None:
        self.now += ROUND_SECONDS
        self._go_on()
        view = self.view()
        decision, self.state, seen = decide(view, self.state, self.settings, self.now)
        self.rounds.append(seen)
        if decision is not None:
            self.on_decision(self, view, self.state, decision)
            self.decisions.append((self.now, decision))
            self._begin(decision)

    def view(self) -> MeshView:
        under_way = tuple(
            UnderWay(one.move_id, one.decision.instance, one.decision.host) for one in self.moving
        )
        return MeshView(tuple(self._loaded(one) for one in self.devices.values()), under_way)

    def _loaded(self, one: Device) -> Device:
        """What it reports under the demands of now."""
        own = self._work_at_home(one)
        hosted = sum(
            self._work_of(home, placed.module)
            for home in self.devices.values()
            for placed in home.placement.placed
            if placed.worker == one.worker
        )
        wanted = (own + hosted) * self._noise()
        busy = min(1.0, wanted) * one.device_share
        num_wanted = int(self.demands[one.worker].memory * NUM_BLOCKS)
        hosted_part = hosted / (own + hosted) if own + hosted else 0.0
        num_used_blocks = min(one.num_blocks, int(num_wanted * self._noise()))
        load = reported_load(
            busy_share=busy,
            hosted_busy_share=busy * hosted_part,
            away_share=0.0,
            device_share=one.device_share,
            queued_seconds=max(0.0, wanted - 1.0) * 2,
            num_used_blocks=num_used_blocks,
            num_blocks=one.num_blocks,
        )
        return replace(
            one, load=load, hosted_part=hosted_part if busy else 0.0, num_used_blocks=num_used_blocks
        )

    def _noise(self) -> float:
        return 1.0 + self.random.uniform(-self.noise, self.noise)

    def _work_of(self, home: Device, module: Module) -> float:
        work = self.demands[home.worker].work
        share = len(module.layers) / SHAPE.num_layers
        if module.kind is ModuleKind.HEADS:
            share *= ATTENTION_SHARE * len(module.kv_heads) / SHAPE.num_kv_heads
        return work * share

    def _work_at_home(self, home: Device) -> float:
        away = sum(self._work_of(home, placed.module) for placed in home.placement.placed)
        return self.demands[home.worker].work - away

    def _begin(self, decision: Outbound | Inbound | Flip) -> None:
        if isinstance(decision, Flip):
            before = self.devices.pop(decision.worker)
            reborn = f"{decision.to.value}-{len(self.decisions)}-again"
            self.devices[reborn] = device(reborn, decision.to)
            self.demands[reborn] = Demand()
            assert before.role is not decision.to
            return
        move_id = new_move_id(self.now, f"{len(self.decisions):04x}", is_automatic=True)
        self.moving.append(Moving(decision, move_id, MOVE_ROUNDS))

    def _go_on(self) -> None:
        for one in list(self.moving):
            one.rounds_left -= 1
            if not one.rounds_left:
                self.moving.remove(one)
                self._switch(one)

    def _switch(self, moving: Moving) -> None:
        decision = moving.decision
        home, host = self.devices[decision.instance], self.devices[decision.host]
        if isinstance(decision, Outbound):
            smoothed = self.state.devices
            predicted = predict_outbound(decision, smoothed[home.worker], smoothed[host.worker])
            placed = PlacedModule(
                move_id=moving.move_id,
                module=decision.module,
                worker=host.worker,
                has_weights_at_owner=not decision.with_weights,
                num_blocks=predicted.num_blocks,
            )
            placement = home.placement.with_module(placed)
            self.switched_at[moving.move_id] = self.now
            sign, weights = 1, decision.with_weights
        else:
            found = home.placement.get(decision.move_id)
            assert found is not None
            placed, placement = found, home.placement.without(decision.move_id)
            sign, weights = -1, not found.has_weights_at_owner
        num_bytes = int(placed.num_blocks * module_block_bytes(home, placed.module))
        num_bytes += len(placed.module.layers) * SHAPE.layer_memory_bytes if weights else 0
        self._put(replace(host, hosted_bytes=host.hosted_bytes + sign * num_bytes))
        self._put(replace(home, placement=msgspec.structs.replace(placement, epoch=home.placement.epoch + 1)))

    def _put(self, one: Device) -> None:
        """With the blocks that its memory and its hosts leave it."""
        num_blocks = capacity(one, one.placement, usable_bytes(one))
        self.devices[one.worker] = replace(one, num_blocks=num_blocks)
