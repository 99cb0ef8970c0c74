"""Weights on their way to a host."""

import pytest
import torch
from workers_reference import tiny_model

from libs.worker.migration.framing import BadFrame
from libs.worker.migration.host.weights import IncomingWeights, form_of

MODEL = tiny_model()


@pytest.mark.parametrize(
    ("layer", "name", "first_byte", "num_bytes"),
    [(2, "qkv.weight", 0, 4), (0, "nonsense", 0, 4), (0, "qkv.weight", 4, 4), (0, "attention_norm", 0, 999)],
)
def test_weights_out_of_place_are_refused(layer: int, name: str, first_byte: int, num_bytes: int) -> None:
    incoming = IncomingWeights(form_of(MODEL), range(2))
    with pytest.raises(BadFrame):
        incoming.take(layer, name, first_byte, torch.zeros(num_bytes, dtype=torch.uint8))
