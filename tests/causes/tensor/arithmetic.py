"""Seeded faults of `aprfmt/causes/tensor/arithmetic.py`."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from aprfmt.causes.tensor import arithmetic
from tests.causes.faults import HIDDEN, NORM, UP, Fault, computed, moved


def _ulps(x: Any) -> Any:
    x = x.copy()
    x[::3] += 1
    return x


def through(name: str, encoding: str) -> Callable[[Any], Any]:
    """Return how values come back from an encoding."""
    from aprfmt.codecs import decode, encode

    return lambda x: decode(encoding, encode(encoding, x), x.shape)


_FACTORS = 1 + np.arange(HIDDEN)[:, None] / 50

FAULTS = (
    Fault("one added", "norm_offset", NORM, computed(NORM, lambda x: x + np.float32(1)),
          arithmetic.guess_norm_offset, "plus 1"),
    Fault("one taken", "norm_offset", NORM, computed(NORM, lambda x: x - np.float32(1)),
          arithmetic.guess_norm_offset, "minus 1"),
    Fault("one added twice, rounded", "norm_offset", NORM,
          computed(NORM, lambda x: ((x + 1).astype(ml_dtypes.bfloat16) + 1).astype(np.float32)),
          arithmetic.guess_norm_offset, "plus 2"),
    Fault("scaled", "scale", UP, computed(UP, lambda x: x * np.float32(8)), arithmetic.guess_scale,
          "sqrt(hidden_size)"),
    Fault("rows scaled", "scale", UP, computed(UP, lambda x: x * _FACTORS.astype(np.float32)),
          arithmetic.guess_scale, "a factor of its own"),
    Fault("columns scaled", "scale", UP, computed(UP, lambda x: x * _FACTORS.T.astype(np.float32)),
          arithmetic.guess_scale, "every column"),
    Fault("a unit in the last place", "rounding", UP, moved(UP, _ulps), arithmetic.guess_rounding,
          "one unit in the last place of BF16", quantized=False),
    Fault("rounded to f8", "rounding", UP,
          computed(UP, lambda x: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)),
          arithmetic.guess_rounding, "rounded to F8_E4M3", quantized=False),
    Fault("went through Q4_0", "quantisation", UP, computed(UP, through(UP, "Q4_0")),
          arithmetic.guess_quantization,
          "quantized to Q4_0 and decoded again / encoded 64 of 64 rows again: equal"),
)  # fmt: skip
