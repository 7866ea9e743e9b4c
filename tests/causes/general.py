"""Seeded faults of `aprfmt/causes/general.py`."""

from typing import Any

import numpy as np

from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine


def one_nan(op: Any, x: Any, kind: str, **how: Any) -> Any:
    """Return an activation with one NaN."""
    y = np.array(op(x, kind, **how))
    y[6, 11] = np.nan
    return y


ENGINE_FAULTS = (
    engine("nan-activation", "llama", "one value of one activation is NaN", "nonfinite",
           "L0.ffn_act", fine=True, backend=lambda: broken("activate", one_nan)),
)  # fmt: skip
