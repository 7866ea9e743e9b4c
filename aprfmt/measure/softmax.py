"""The softmax of rows of scores and its logarithm, computed without overflow."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]


def softmax(scores: Numbers, axis: int = -1) -> Numbers:
    """Return the softmax of scores over an axis, in their dtype.

    A score of -inf gives 0; an axis of these alone gives NaN.
    """
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    found: Numbers = powers / powers.sum(axis=axis, keepdims=True)
    return found


def log_softmax(scores: Numbers) -> Numbers:
    """Return the logarithm of the softmax of scores over the last axis, in their dtype."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    found: Numbers = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def log_sum_exp(values: NDArray[np.float64]) -> float:
    """Return the logarithm of the sum of exponentials of finite values, without overflow."""
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))
