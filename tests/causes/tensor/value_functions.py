"""Seeded faults of `aprfmt/causes/tensor/value_functions.py`."""

import numpy as np

from aprfmt.causes.tensor import value_functions
from tests.causes.faults import UP, Fault, computed

FAULTS = (
    Fault(
        "squares",
        "function_of",
        UP,
        computed(UP, np.square),
        value_functions.guess_value_function,
        "the squares of A's",
        quantized=False,
    ),
    Fault(
        "clipped",
        "function_of",
        UP,
        computed(UP, lambda x: np.clip(x, -1.5, 1.5)),
        value_functions.guess_clipped,
        "the largest are cut off",
        quantized=False,
    ),
)
