"""The coordinator's live loop on the simulated mesh: it sees loads and decides; moves take their time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from libs.balancing.control_loop import decide
from libs.balancing.footprint import capacity, module_block_bytes, usable_bytes
from libs.balancing.ledger import new_move_id
from libs.balancing.loop_state import LoopState
from libs.balancing.mesh_view import BringHome, Device, MeshView, MoveAway, Role, UnderWay
from libs.balancing.prediction import predict_away, predict_home
from libs.balancing.settings import BalancingSettings
from libs.cost.migration import LinkCost, ModelShape, step_overhead_seconds, weight_memory_bytes
from libs.placement.placement import Placed, all_home
from libs.simulator.decode_instance import DecodeInstance
from libs.simulator.event_loop import Due
from libs.simulator.pace import Pace
from libs.simulator.prefill_instance import PrefillInstance
from libs.simulator.shared_devices import device_use, fractions, slowdown

ROUND_SECONDS = 0.5


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
        decision, self._state, seen = decide(view, self._state, self._settings, now)
        self.peaks.append(max(one.utilization for one in seen.devices))
        dues = self._set_paces(now, busy)
        if isinstance(decision, MoveAway | BringHome):
            dues.append(self._begin(decision, view, now))
        return [*dues, Due(now + ROUND_SECONDS, self._round)]

    def _fresh(self, name: str, num_blocks: int) -> Device:
        return Device(
            worker=name,
            name=name,
            role=Role.PREFILL if name in self._prefills else Role.DECODE,
            fingerprint="simulated",
            can_host=True,
            shape=self._model,
            placement=all_home(name, self._model.num_layers, self._model.num_kv_heads),
            device_share=self._share,
            busy_share=0.0,
            hosted_busy_share=0.0,
            away_share=0.0,
            queued_seconds=0.0,
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
            facts = replace(
                device,
                busy_share=min(self._share, use[name].own + use[name].hosted),
                hosted_busy_share=min(self._share, use[name].hosted),
                away_share=busy[name] * (1 - parts[name][name]),
            )
            loaded.append(replace(facts, **self._work_of(name, now)))
        return loaded

    def _work_of(self, name: str, now: float) -> dict[str, Any]:
        if prefill := self._prefills.get(name):
            return {
                "queued_seconds": prefill.queued_seconds(now),
                "num_used_blocks": prefill.allocator.num_used,
                "tokens_per_second": self._prompt_rates[name],
            }
        decode = self._decodes[name]
        return {
            "num_used_blocks": decode.num_reserved_blocks,
            "num_running": decode.num_running,
            "tokens_per_second": decode.tokens_per_second,
        }

    def _parts(self) -> dict[str, dict[str, float]]:
        share = self._settings.attention_share
        return {name: fractions(device.placement, share) for name, device in self._devices.items()}

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
        link = LinkCost(self._settings.link_bytes_per_second, self._settings.link_latency_seconds)
        decode = self._decodes.get(device.worker)
        num_tokens = (
            max(1, decode.num_running) if decode else self._prefills[device.worker].shape.max_step_tokens
        )
        return sum(
            step_overhead_seconds(link, self._model, one.module, num_tokens)
            for one in device.placement.placed
        )

    def _begin(self, decision: MoveAway | BringHome, view: MeshView, now: float) -> Due:
        move_id = new_move_id(now, f"{self.num_moves:06}", is_automatic=True)
        self.num_moves += 1
        loaded = {one.worker: one for one in view.devices}
        home, host = loaded[decision.instance], loaded[decision.host]
        if isinstance(decision, MoveAway):
            predicted = predict_away(decision, home, host, self._state.loads, self._settings)
        else:
            predicted = predict_home(decision, home, host, self._state.loads, self._settings)
        self._under_way[move_id] = UnderWay(move_id, decision.instance, decision.host)
        ends = partial(self._ends, decision, move_id, predicted.num_blocks)
        return Due(now + predicted.move_seconds, ends)

    def _ends(self, decision: MoveAway | BringHome, move_id: str, num_blocks: int, now: float) -> list[Due]:
        del self._under_way[move_id]
        home, host = self._devices[decision.instance], self._devices[decision.host]
        if isinstance(decision, MoveAway):
            placed = Placed(
                move_id=move_id,
                module=decision.module,
                worker=host.worker,
                has_weights_at_home=not decision.with_weights,
                num_blocks=num_blocks,
            )
            placement, sign = home.placement.with_module(placed), 1
        else:
            found = home.placement.get(decision.move_id)
            if found is None:
                return []
            placed, placement, sign = found, home.placement.without(decision.move_id), -1
        num_bytes = int(placed.num_blocks * module_block_bytes(home, placed.module))
        with_weights = not placed.has_weights_at_home
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
