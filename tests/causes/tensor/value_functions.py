"""Seeded faults of `aprfmt/causes/tensor/value_functions.py`."""

import numpy as np

from aprfmt.causes.tensor import value_functions
from tests.compare.faults import UP, Fault, computed

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
)
