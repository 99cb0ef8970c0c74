import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.sampling.distribution import draw, keep, weights


def kept_tokens(logits: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    mass = weights(torch.tensor([logits]), torch.ones(1))
    kept = keep(
        mass,
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p], dtype=torch.float32),
    )
    return set(torch.nonzero(kept[0])[:, 0].tolist())


def expected_tokens(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """By the definition: sort, cut, and take along what weighs the same as the last one kept."""
    mass = np.exp(np.array(logits, dtype=np.float32) - np.float32(max(logits)))
    kept = [token for token in np.argsort(-mass, kind="stable") if mass[token] >= np.float32(min_p)]
    if top_k:
        least = mass[kept[min(top_k, len(kept)) - 1]]
        kept = [token for token in kept if mass[token] >= least]
    if top_p < 1:
        share = mass[kept].astype(np.float64)
        num_kept = int((share.cumsum() - share < top_p * share.sum()).sum())
        kept = [token for token in kept if mass[token] >= mass[kept[max(num_kept, 1) - 1]]]
    return {int(token) for token in kept}


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 2)
    mass = weights(logits, torch.tensor([0.5, 2.0]))
    assert torch.allclose(mass, torch.tensor([[0.0, -2.0, -4.0], [0.0, -0.5, -1.0]]).exp())


def test_filters_by_hand() -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.3]).tolist()
    assert kept_tokens(logits) == {0, 1, 2, 3}
    assert kept_tokens(logits, top_k=2) == {1, 3}
    assert kept_tokens(logits, top_p=0.65) == {1, 3}
    assert kept_tokens(logits, top_p=0.75) == {1, 2, 3}
    assert kept_tokens(logits, top_p=0.01) == {1}
    assert kept_tokens(logits, min_p=0.6) == {1, 3}
    assert kept_tokens(logits, top_k=3, top_p=0.7) == {1, 3}, "top_p is a share of what top_k left"


def test_tokens_of_equal_weight_stay_or_go_together() -> None:
    assert kept_tokens([1.0, 1.0, 1.0, 0.0], top_k=2) == {0, 1, 2}
    assert kept_tokens([0.0] * 3000, top_k=5) == set(range(3000)), "ties beyond every candidate list"


def test_a_flat_distribution_needs_more_candidates_than_the_first_lists_hold() -> None:
    logits = (-np.arange(5000) * 1e-5).tolist()
    assert kept_tokens(logits, top_p=0.5) == expected_tokens(logits, 0, 0.5, 0.0)
    assert len(kept_tokens(logits, top_k=2000)) == 2000


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda tenth: tenth / 4), min_size=1, max_size=200),
    top_k=st.integers(0, 250),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters_keep_what_their_definition_says(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    kept = kept_tokens(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    mass = np.exp(np.array(logits) - max(logits))
    boundary = (
        expected_tokens(logits, top_k, top_p * (1 - 1e-9), min_p),
        expected_tokens(logits, top_k, min(1.0, top_p * (1 + 1e-9)), min_p),
    )
    assert kept in boundary
    assert int(mass.argmax()) in kept


@given(
    masses=st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.3, 1.0]), min_size=1, max_size=400),
    noise=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53)),
)
def test_a_draw_is_the_inverse_of_the_cdf_in_vocabulary_order(masses: list[float], noise: float) -> None:
    masses = [*masses, 1.0]
    token = int(draw(torch.tensor([masses]), torch.tensor([noise], dtype=torch.float64))[0])
    shares = np.array(masses, dtype=np.float32).astype(np.float64)
    ends = shares.cumsum() / shares.sum()
    assert masses[token] > 0
    assert ends[token] > noise - 1e-6
    assert ends[token] - shares[token] / shares.sum() <= noise + 1e-6


def test_draws_follow_the_distribution_and_rows_are_independent() -> None:
    mass = torch.rand(3, 700, generator=torch.Generator().manual_seed(1))
    noise = (torch.arange(9000, dtype=torch.float64) + 0.5) / 9000
    for row in range(3):
        tokens = draw(mass[row].expand(9000, -1), noise)
        counts = torch.bincount(tokens, minlength=700) / 9000
        assert torch.allclose(counts, mass[row] / mass[row].sum(), atol=2.5e-4)
    assert torch.equal(draw(mass, noise[[5, 400, 8000]])[1:], draw(mass[1:], noise[[400, 8000]]))


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 49152])
def test_any_vocabulary_size_can_be_drawn_from(vocab_size: int) -> None:
    mass = torch.zeros(1, vocab_size)
    mass[0, vocab_size - 1] = 1.0
    for noise in (0.0, 0.5, 1 - 2.0**-53):
        assert int(draw(mass, torch.tensor([noise], dtype=torch.float64))[0]) == vocab_size - 1
