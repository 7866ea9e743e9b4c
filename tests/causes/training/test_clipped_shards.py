"""Gradients of which each rank clipped its own shards: named with factors, and no others are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.clipped_shards import shard_clipping
from aprfmt.causes.training.gradient_case import GradientCase
from tests.training.ranks import clipped, shards

SHAPES: Mapping[str, tuple[int, ...]] = {
    "token_embd.weight": (50, 24), "L0.attn_q.weight": (24, 24), "L0.attn_norm.weight": (24,),
    "L0.ffn_gate_exps.weight": (6, 16, 24), "L0.ffn_up.weight": (41, 24),
}  # fmt: skip


def gradients() -> dict[str, Any]:
    """Return random gradients, each of its own size, float64."""
    rng = np.random.default_rng(3)
    return {
        key: rng.normal(size=shape) * np.linspace(1, 4, shape[0]).reshape(-1, *[1] * len(shape[1:]))
        for key, shape in SHAPES.items()
    }


def cases(given: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, GradientCase]:
    """Return the cases of gradients, in float32 as a trainer saves them."""
    return {
        key: GradientCase(
            key, given[key].astype(np.float32).astype(np.float64).reshape(len(right[key]), -1),
            right[key].reshape(len(right[key]), -1),
        )
        for key in right
    }  # fmt: skip


def said(given: Mapping[str, Any], bounds: Sequence[float] = (1.0,)) -> str | None:
    right = gradients()
    return shard_clipping(cases(given, right), SHAPES, bounds)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rows", "its rows of each gradient"),
        ("flat", "its flat piece of each gradient"),
        ("buffer", "its piece of one flat buffer of all gradients"),
    ],
)
def test_ranks_that_clip_their_own_shards_are_named(ranks: int, how: str, words: str) -> None:
    """Seen red: nothing but the distance was said."""
    text = said(clipped(gradients(), ranks, how, 1.0))
    assert text is not None and text.startswith(f"each of {ranks} ranks clipped {words} to 1 by")
    right = gradients()
    first = np.sqrt(sum(float(np.square(x).sum()) for x in shards(right, ranks, how)[0]))
    assert f"the factors are {1 / (first + 1e-6):.4g} (norm {first:.5g}), " in text
    assert ("all lie between" in text) == (ranks > 4)


def test_a_rank_whose_norm_is_below_the_bound_keeps_its_gradients() -> None:
    right = gradients()
    norms = [
        np.sqrt(sum(float(np.square(x).sum()) for x in each)) for each in shards(right, 2, "rows")
    ]
    bound = sum(norms) / 2
    text = said(clipped(right, 2, "rows", bound), (bound,))
    assert text is not None and f" 1 (norm {min(norms):.5g})" in text


def by_all(right: Mapping[str, Any]) -> dict[str, Any]:
    norm = np.sqrt(sum(float(np.square(x).sum()) for x in right.values()))
    return {key: x / (norm + 1e-6) for key, x in right.items()}


def by_each(right: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x / (np.linalg.norm(x) + 1e-6) for key, x in right.items()}


def one_row_off(right: Mapping[str, Any]) -> dict[str, Any]:
    made = clipped(right, 2, "rows", 1.0)
    made["L0.ffn_up.weight"][3] *= 1.5
    return made


def other_factors(right: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: x.copy() for key, x in right.items()}
    for pieces, factor in zip(shards(made, 2, "rows"), (0.03, 0.05), strict=True):
        for piece in pieces:
            piece *= factor
    return made


@pytest.mark.parametrize("change", [dict, by_all, by_each, one_row_off, other_factors])
def test_other_gradients_are_not_called_clipped_by_ranks(change: Any) -> None:
    assert said(change(gradients()), (0.5, 1.0, 5.0)) is None
