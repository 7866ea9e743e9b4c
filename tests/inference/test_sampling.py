"""Sampling against transformers' logits processors, and what a seed promises.

Seen red: the token that crosses top_p dropped, top_k ignored, temperature multiplied, a tiny
temperature that made every probability NaN.
"""

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from aprfmt.errors import AprfmtError, UsageError
from aprfmt.inference.sampling import Sampler, Sampling, token_probabilities

LOGITS = np.random.default_rng(0).standard_normal(97).astype(np.float32) * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
def test_what_may_be_drawn_is_what_transformers_leaves(
    temperature: float, top_k: int, top_p: float
) -> None:
    scores = torch.tensor(LOGITS, dtype=torch.float64)[None]
    nothing = torch.zeros((1, 1), dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(nothing, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(nothing, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(nothing, scores)
    expected = torch.softmax(scores, -1)[0].numpy()
    ids, probs = token_probabilities(LOGITS, Sampling(temperature, top_k, top_p))
    found = np.zeros_like(expected)
    found[ids] = probs
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    def drawn(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler(LOGITS) for _ in range(40)]

    assert drawn(5) == drawn(5) != drawn(6)


def test_frequencies_follow_the_probabilities() -> None:
    sampler = Sampler(Sampling(1.0, top_k=3, seed=1))
    ids, probs = token_probabilities(LOGITS, sampler.sampling)
    counts = np.bincount([sampler(LOGITS) for _ in range(4000)], minlength=97)
    assert counts.sum() == counts[ids].sum()
    np.testing.assert_allclose(counts[ids] / 4000, probs, atol=0.03)


def test_greedy_takes_the_highest_and_the_lower_id_of_equals() -> None:
    assert Sampler(Sampling())(LOGITS) == int(np.argmax(LOGITS))
    assert Sampler(Sampling())(np.array([1.0, 3.0, 3.0])) == 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-320])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    best = int(np.argmax(LOGITS))
    ids, probs = token_probabilities(LOGITS, Sampling(temperature))
    assert (ids[0], probs[0], probs[1:].max()) == (best, 1.0, 0.0)
    sampler = Sampler(Sampling(temperature, top_p=0.9))
    assert {sampler(LOGITS) for _ in range(5)} == {best}
    masked = np.where(np.arange(97) % 2, LOGITS, -np.inf).astype(np.float32)
    assert Sampler(Sampling(1.0))(masked) % 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "found"),
    [
        ([np.nan, 1.0, np.nan], "2 NaN and 0 infinities of 3"),
        ([np.inf, 1.0, 2.0], "0 NaN and 1 infinities of 3"),
        ([-np.inf] * 3, "0 NaN and 3 infinities of 3"),
    ],
)
def test_logits_that_say_nothing_are_refused(
    logits: list[float], found: str, temperature: float
) -> None:
    with pytest.raises(AprfmtError, match=found):
        Sampler(Sampling(temperature))(np.array(logits))


def test_senseless_values_are_refused() -> None:
    for bad in (
        {"temperature": -1.0},
        {"temperature": np.inf},
        {"temperature": np.nan},
        {"top_p": 0.0},
        {"top_p": np.nan},
        {"top_k": -1},
        {"seed": -2},
    ):
        with pytest.raises(UsageError, match="expected"):
            Sampling(**bad)
