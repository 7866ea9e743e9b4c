"""LoRA pairs next to a frozen base, as what they are in a file: needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class AdapterPair:
    """One LoRA pair: `a` [r, in] and `b` [out, r] under the adapter's own names.

    `rows` says by role key which rows of `b` are the role's, in the role's order; of joined
    projections there are several roles. `lengths` [out] are DoRA's magnitudes, None of a plain
    pair. `names` are the stored names by key: that of the weight with `.lora_a` and `.lora_b` after
    it, and `.lora_magnitude` for lengths.
    """

    names: Mapping[str, str]
    a: Array
    b: Array
    scale: float
    rows: Mapping[str, NDArray[np.int64]]
    lengths: Array | None = None
