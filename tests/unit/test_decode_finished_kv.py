from types import SimpleNamespace
from typing import Any

from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry, Counter

from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams
from libs.worker.decode.finished_kv import MAX_WAITING, FinishedKvUploads
from libs.worker.decode.sequences import HeldSequence


def sequence(num_prompt: int, num_output: int, *, prefill: str = "p") -> HeldSequence:
    generation = Generation("r", pack_token_ids([1] * num_prompt), num_prompt, SamplingParams(), "g", 1e12)
    return HeldSequence(generation, prefill, 0.0, INVALID_SPAN, output_ids=[2] * num_output)


class Scene:
    def __init__(self, *, are_there: bool = True) -> None:
        self.not_kept = Counter("not_kept", "Sequences.", registry=CollectorRegistry())
        stores: Any = SimpleNamespace(are_there=are_there)
        engine: Any = None
        self.keeping = FinishedKvUploads(engine, stores, self.not_kept, fingerprint="f", block_size=4)

    def waits(self, held: HeldSequence) -> bool:
        before = len(self.keeping._waiting)
        self.keeping.finished(held)
        return len(self.keeping._waiting) > before


def test_a_sequence_waits_only_where_a_block_got_full_that_nobody_else_puts() -> None:
    scene = Scene()
    assert not scene.waits(sequence(10, 2))  # 11 tokens have KV: the blocks are the prompt's
    assert scene.waits(sequence(10, 3))
    assert not scene.waits(sequence(8, 4))
    assert scene.waits(sequence(8, 5))
    assert scene.waits(sequence(10, 1, prefill=""))
    assert not scene.waits(sequence(3, 1, prefill=""))
    assert not Scene(are_there=False).waits(sequence(10, 30))


def test_of_too_many_the_oldest_are_forgotten_and_counted() -> None:
    scene = Scene()
    for number in range(MAX_WAITING + 3):
        scene.keeping.finished(sequence(10, 3 + number))
    assert len(scene.keeping._waiting) == MAX_WAITING
    assert len(scene.keeping._waiting[0].output_ids) == 6
    assert scene.not_kept._value.get() == 3
