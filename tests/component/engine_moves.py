"""Models of several shapes, a home with hosts in the same process, and moves in one line, for move tests."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from memory_host import MemoryHost, synchronous_host
from random_model import random_model

from libs.engine.core import EngineCore
from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.port import Answer, Host, HostLost
from libs.engine.outputs import StepOutput, Switched
from libs.engine.settings import EngineSettings
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.placement.module import Module, ModuleKind
from libs.placement.placement import PlacedModule
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams

SIZE = 8
MANY = 1 << 30


def _config(num_heads: int, num_kv_heads: int, *, qk_norm: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture=Architecture.QWEN3 if qk_norm else Architecture.LLAMA,
        num_layers=4,
        hidden_size=32,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        intermediate_size=48,
        vocab_size=60,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=512,
        eos_token_ids=(0,),
        qk_norm=qk_norm,
    )


CONFIGS = {
    "gqa": _config(9, 3),
    "mha": _config(4, 4),
    "qk_norm": _config(8, 2, qk_norm=True),
    "one_head": _config(4, 1),
}


@cache
def model_of(shape: str) -> Model:
    """Random weights, float32; layers that leave can be read again from a second copy."""
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
    return random_model(CONFIGS[shape], seed=4, dtype=torch.float32)


def prompt_of(length: int, kind: int = 0) -> list[int]:
    return [(7 * place + 13 * kind + place * place) % 59 + 1 for place in range(length)]


def generation(prompt: list[int], name: str, *, max_tokens: int = 24, seed: int | None = None) -> Generation:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if seed is None else 1.0,
        ignore_eos=True,
        seed=seed or 0,
    )
    return Generation(name, pack_token_ids(prompt), len(prompt), sampling, "g", math.inf)


def core_of(model: Model, home: str = "home", **options: object) -> EngineCore:
    sizes = {
        "max_model_len": 256,
        "num_blocks": 120,
        "block_size": SIZE,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
    }
    given = {key: options.pop(key) for key in list(options) if key in sizes or key == "prefix_cache"}
    settings = EngineSettings(**(sizes | given))  # type: ignore[arg-type]  # sizes as the settings name them
    return EngineCore(model, settings, home=home, **options)  # type: ignore[arg-type]  # options as it names them


class _Fused:
    """A host that is lost after so many calls."""

    def __init__(self, host: MemoryHost, fuses: dict[str, int]) -> None:
        self._host, self._fuses = host, fuses
        self.worker = host.worker

    def call(self, call: HostedCall) -> Answer:
        left = self._fuses.get(self.worker)
        if left is None:
            return self._host.call(call)
        self._fuses[self.worker] = left - 1
        if left > 0:
            return self._host.call(call)
        answer = Answer(lambda: None)
        answer.fail(HostLost(self.worker, "its fuse has burnt down"))
        return answer


@dataclass
class Mesh:
    """One home, and hosts with the same model, whose modules run when they are called."""

    home: EngineCore
    hosts: dict[str, EngineCore] = field(default_factory=dict[str, EngineCore])
    fuses: dict[str, int] = field(default_factory=dict[str, int])
    """Hosts that answer so many calls and then no more."""

    def place(
        self,
        module: Module,
        move_id: str,
        worker: str = "host",
        *,
        with_weights: bool = False,
        lent: int = 20,
    ) -> PlacedModule:
        """Opens the module at the host and says what is there."""
        host = self.hosts.setdefault(worker, core_of(self.home.model, worker, num_blocks=400))
        placed = PlacedModule(
            move_id=move_id, module=module, worker=worker, has_weights_at_owner=not with_weights
        )
        wanted = lent if module.kind is ModuleKind.TOKENS else self.home.migrator.layout.capacity_with(placed)
        model = self.home.model
        layers = {layer: model.layer(layer) for layer in module.layers} if with_weights else None
        granted = host.hosted.open(
            "home", move_id, module, num_blocks_wanted=wanted, num_blocks_least=1, layers=layers
        )
        return PlacedModule(
            move_id=move_id,
            module=module,
            worker=worker,
            has_weights_at_owner=not with_weights,
            num_blocks=granted,
        )

    def begin(self, module: Module, move_id: str, worker: str = "host", **how: object) -> int:
        placed = self.place(module, move_id, worker, **how)  # type: ignore[arg-type]  # as `place` names them
        after = None if placed.has_weights_at_owner else self.home.model.without_layers(module.layers)
        return self.home.migrator.begin(placed, self.host(worker), after)

    def host(self, worker: str) -> Host:
        """The way to it."""
        host = synchronous_host(worker, "home", self.hosts[worker].hosted)
        return _Fused(host, self.fuses)

    def named(self, module: Module, move_id: str, worker: str) -> PlacedModule:
        """Not opened anywhere."""
        return PlacedModule(move_id=move_id, module=module, worker=worker)

    def begin_return(self, move_id: str) -> int:
        placed = self.home.placement.get(move_id)
        after = None
        if placed is not None and not placed.has_weights_at_owner:
            layers = self.home.model.reload_layers(placed.module.layers)
            after = self.home.model.with_layers(layers)
        return self.home.migrator.begin_return(move_id, after)

    def switch(self, move_id: str) -> Switched:
        return self.home.migrator.switch(move_id)

    def away(self, module: Module, move_id: str, worker: str = "host", **how: object) -> Switched:
        """Moves at once, in one gap between two steps."""
        self.begin(module, move_id, worker, **how)
        self.home.migrator.copy_some(move_id, MANY)
        return self.switch(move_id)

    def back(self, move_id: str) -> Switched:
        self.begin_return(move_id)
        self.home.migrator.copy_some(move_id, MANY)
        worker = next(one.worker for one in self.home.placement.placed if one.move_id == move_id)
        switched = self.switch(move_id)
        self.hosts[worker].hosted.close("home", move_id)
        return switched


def begin(core: EngineCore, asked: Generation, **more: object) -> None:
    assert core.sequences.reserve(asked, asked.request_id, whole_prompt=False) is not None
    core.sequences.begin(asked.request_id, num_computed_tokens=0, **more)  # type: ignore[arg-type]


@dataclass
class Told:
    """What steps gave, in order."""

    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, step: StepOutput) -> None:
        for token in (*step.tokens, *step.prompts_done):
            self.tokens.setdefault(token.sequence_id, []).append(token.token_id)
        for failure in step.failed:
            self.failed[failure.sequence_id] = failure.reason.value


def drain(
    core: EngineCore, between: Callable[[int], object] = lambda _: None, told: Told | None = None
) -> Told:
    """Steps until there is nothing to do; `between` is called before each, with its number."""
    told = told or Told()
    for number in range(5000):
        between(number)
        step = core.step()
        told.add(step)
        if step.is_idle:
            return told
    raise AssertionError("the engine does not come to rest")


def check_baseline(core: EngineCore) -> None:
    table = core.sequences
    assert table.allocator.num_used == 0
    assert not table.by_id
    assert not table.by_age
    assert table.rows.num_taken == 0
