"""The coordinator's live loop on the simulated mesh: it sees loads and decides; moves take their time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from libs.balancing.decide import decide
from libs.balancing.device_model import (
    ATTENTION_SHARE,
    LINK,
    capacity,
    module_block_bytes,
    predict_inbound,
    predict_outbound,
    usable_bytes,
)
from libs.balancing.settings import BalancingSettings
from libs.balancing.state import LoopState
from libs.balancing.view import (
    Device,
    Inbound,
    Load,
    MeshView,
    Outbound,
    UnderWay,
    reported_load,
)
from libs.cost.migration import ModelShape, step_overhead_seconds, weight_memory_bytes
from libs.placement.migration import new_move_id
from libs.placement.placement import PlacedModule, all_at_owner
from libs.placement.role import Role
from libs.simulator.decode_instance import DecodeInstance
from libs.simulator.event_loop import Due
from libs.simulator.pace import Pace
from libs.simulator.prefill_instance import PrefillInstance
from libs.simulator.shared_devices import device_use, fractions, slowdown

ROUND_SECONDS = 0.5
_NO_LOAD = Load(compute=0.0, memory=0.0, queue=0.0, occupancy=0.0)


class Balancing:
    """Rounds from `first_round` on, as long as `is_over` says that there is work."""

    def __init__(
        self,
        prefills: Sequence[PrefillInstance],
        decodes: Sequence[DecodeInstance],
        model: ModelShape,
        settings: BalancingSettings,
        device_share: float,
        is_over: Callable[[], bool],
        changed: Callable[[float], list[Due]],
    ) -> None:
        self._prefills = {one.name: one for one in prefills}
        self._decodes = {one.name: one for one in decodes}
        self._model, self._settings, self._share = model, settings, device_share
        self._is_over, self._changed = is_over, changed
        blocks = {one.name: one.shape.num_blocks for one in prefills}
        blocks |= {one.name: one.shape.num_blocks for one in decodes}
        self._devices = {name: self._fresh(name, num_blocks) for name, num_blocks in blocks.items()}
        self._computed: dict[str, tuple[float, int]] = dict.fromkeys(self._prefills, (0.0, 0))
        self._prompt_rates = dict.fromkeys(self._prefills, 0.0)
        self._state = LoopState()
        self._under_way: dict[str, UnderWay] = {}
        self.num_moves = 0
        self.peaks: list[float] = []
        """The greatest utilization of each round."""

    def first_round(self, now: float) -> list[Due]:
        """Let devices be as slow as their shares, and begin."""
        dues = self._set_paces(now, dict.fromkeys(self._devices, 0.0))
        return [*dues, Due(now + ROUND_SECONDS, self._round)]

    def _round(self, now: float) -> list[Due]:
        if self._is_over():
            return []
        busy = self._measure()
        view = MeshView(tuple(self._loaded(busy, now)), tuple(self._under_way.values()))
        decision, self._state, report = decide(view, self._state, self._settings, now)
        self.peaks.append(max(one.utilization for one in report.devices))
        dues = self._set_paces(now, busy)
        if isinstance(decision, Outbound | Inbound):
            dues.append(self._begin(decision, now))
        return [*dues, Due(now + ROUND_SECONDS, self._round)]

    def _fresh(self, name: str, num_blocks: int) -> Device:
        return Device(
            worker=name,
            name=name,
            role=Role.PREFILL if name in self._prefills else Role.DECODE,
            fingerprint="simulated",
            can_host=True,
            shape=self._model,
            placement=all_at_owner(name, self._model.num_layers, self._model.num_kv_heads),
            load=_NO_LOAD,
            device_share=self._share,
            hosted_part=0.0,
            tokens_per_second=0.0,
            num_running=0,
            memory_bytes=num_blocks * self._model.block_bytes,
            hosted_bytes=0,
            num_blocks=num_blocks,
            num_used_blocks=0,
            num_least_blocks=max(1, num_blocks // 16),
        )

    def _measure(self) -> dict[str, float]:
        """Busy seconds per second of each instance, on all devices together, since the last round."""
        busy = {name: decode.busy_share for name, decode in self._decodes.items()}
        for name, prefill in self._prefills.items():
            now = (prefill.busy_seconds, prefill.num_computed_tokens)
            before, self._computed[name] = self._computed[name], now
            busy[name] = min(1.0, (now[0] - before[0]) / ROUND_SECONDS)
            self._prompt_rates[name] = (now[1] - before[1]) / ROUND_SECONDS
        return {name: busy[name] for name in self._devices}

    def _loaded(self, busy: dict[str, float], now: float) -> list[Device]:
        parts = self._parts()
        use = device_use(busy, parts)
        loaded: list[Device] = []
        for name, device in self._devices.items():
            queued_seconds, num_used_blocks, tokens_per_second, num_running = self._work_of(name, now)
            busy_share = min(self._share, use[name].own + use[name].hosted)
            hosted_busy_share = min(self._share, use[name].hosted)
            load = reported_load(
                busy_share=busy_share,
                hosted_busy_share=hosted_busy_share,
                away_share=busy[name] * (1 - parts[name][name]),
                device_share=device.device_share,
                queued_seconds=queued_seconds,
                num_used_blocks=num_used_blocks,
                num_blocks=device.num_blocks,
            )
            loaded.append(
                replace(
                    device,
                    load=load,
                    hosted_part=hosted_busy_share / busy_share if busy_share > 0 else 0.0,
                    tokens_per_second=tokens_per_second,
                    num_running=num_running,
                    num_used_blocks=num_used_blocks,
                )
            )
        return loaded

    def _work_of(self, name: str, now: float) -> tuple[float, int, float, int]:
        """Queued seconds, used blocks, tokens a second, running sequences."""
        if prefill := self._prefills.get(name):
            return prefill.queued_seconds(now), prefill.allocator.num_used, self._prompt_rates[name], 0
        decode = self._decodes[name]
        return 0.0, decode.num_reserved_blocks, decode.tokens_per_second, decode.num_running

    def _parts(self) -> dict[str, dict[str, float]]:
        return {name: fractions(device.placement, ATTENTION_SHARE) for name, device in self._devices.items()}

    def _set_paces(self, now: float, busy: dict[str, float]) -> list[Due]:
        parts = self._parts()
        use = device_use(busy, parts)
        dues: list[Due] = []
        for name, device in self._devices.items():
            pace = Pace(
                slowdown(name, parts[name], busy[name], use, self._share), self._overhead_seconds(device)
            )
            if prefill := self._prefills.get(name):
                prefill.pace = pace
            else:
                dues += self._decodes[name].set_pace(pace, now)
        return dues

    def _overhead_seconds(self, device: Device) -> float:
        decode = self._decodes.get(device.worker)
        num_tokens = (
            max(1, decode.num_running) if decode else self._prefills[device.worker].shape.max_step_tokens
        )
        return sum(
            step_overhead_seconds(LINK, self._model, one.module, num_tokens)
            for one in device.placement.placed
        )

    def _begin(self, decision: Outbound | Inbound, now: float) -> Due:
        move_id = new_move_id(now, f"{self.num_moves:06}", is_automatic=True)
        self.num_moves += 1
        seen = self._state.devices
        home, host = seen[decision.instance], seen[decision.host]
        if isinstance(decision, Outbound):
            predicted = predict_outbound(decision, home, host)
        else:
            predicted = predict_inbound(decision, home, host)
        self._under_way[move_id] = UnderWay(move_id, decision.instance, decision.host)
        ends = partial(self._ends, decision, move_id, predicted.num_blocks)
        return Due(now + predicted.move_seconds, ends)

    def _ends(self, decision: Outbound | Inbound, move_id: str, num_blocks: int, now: float) -> list[Due]:
        del self._under_way[move_id]
        home, host = self._devices[decision.instance], self._devices[decision.host]
        if isinstance(decision, Outbound):
            placed = PlacedModule(
                move_id=move_id,
                module=decision.module,
                worker=host.worker,
                has_weights_at_owner=not decision.with_weights,
                num_blocks=num_blocks,
            )
            placement, sign = home.placement.with_module(placed), 1
        else:
            found = home.placement.get(decision.move_id)
            if found is None:
                return []
            placed, placement, sign = found, home.placement.without(decision.move_id), -1
        num_bytes = int(placed.num_blocks * module_block_bytes(home, placed.module))
        with_weights = not placed.has_weights_at_owner
        num_bytes += weight_memory_bytes(self._model, placed.module, with_weights=with_weights)
        self._settle(replace(host, hosted_bytes=host.hosted_bytes + sign * num_bytes))
        self._settle(replace(home, placement=msgspec.structs.replace(placement)))
        return self._changed(now)

    def _settle(self, device: Device) -> None:
        """With the blocks that its memory and its hosts leave it."""
        num_blocks = capacity(device, device.placement, usable_bytes(device))
        self._devices[device.worker] = replace(device, num_blocks=num_blocks)
        if decode := self._decodes.get(device.worker):
            decode.capacity_blocks = num_blocks
