"""Clipping of elements by value: how many have to be at the bound, and which bound it is."""

from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.causes.training.clipping import AT_BOUND, value_clipping
from aprfmt.causes.training.gradient_case import GradientCase


def cases(bound: float, at_bound: int, other: float = 0.0) -> Any:
    """Return two gradients of which so many elements reach the bound."""
    computed = np.random.default_rng(4).uniform(-0.9, 0.9, (2, 6, 8)) * bound
    for place in range(at_bound):
        computed[place % 2].flat[3 * place] = (1 - 2 * (place % 3 == 0)) * bound * (1.5 + place)
    given = np.clip(computed, -bound, bound)
    given[1, 5, 7] += other
    return {name: GradientCase(name, given[i], computed[i]) for i, name in enumerate("ab")}


# A bound and the type of the gradients that were clipped to it.
BOUNDS = [(1.0, torch.float32), (0.01, torch.float32), (0.0037, torch.float32),
          (25.0, torch.float32), (0.3, torch.bfloat16), (0.7, torch.float16)]  # fmt: skip


@pytest.mark.parametrize(("bound", "dtype"), BOUNDS)
@pytest.mark.parametrize("count", [AT_BOUND - 1, AT_BOUND, AT_BOUND + 1])
def test_a_bound_is_told_where_enough_elements_are_at_it(
    bound: float, dtype: torch.dtype, count: int
) -> None:
    stored = float(torch.tensor(bound).to(dtype))
    found = value_clipping(cases(stored, count))
    if count < AT_BOUND:
        assert found is None
        return
    assert found is not None and (found.by, found.bound, found.scale) == ("value", bound, 1)
    assert value_clipping(cases(stored, count, other=0.3 * bound)) is None


def test_no_gradient_and_zeros_are_not_clipped() -> None:
    assert value_clipping({}) is None
    zeros = np.zeros((6, 8))
    assert value_clipping({"a": GradientCase("a", zeros, zeros)}) is None
    odd = np.full((6, 8), np.inf)
    assert value_clipping({"a": GradientCase("a", odd, odd)}) is None
