"""Seeded faults of `aprfmt/causes/forward/gathered_rows.py`.

Seen red: without the hypothesis they are placed, and not named.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.diagnosis.making import engine


def read_from(wanted: str, at: int, read: Mapping[int, int]) -> Callable[[], Any]:
    """Return what alters a pass so that rows of a point of layer `at` are other rows of it."""

    def alter(point: str, layer: int, x: Any) -> Any:
        if (point, layer) != (wanted, at):
            return x
        made = np.array(x)
        made[[*read]] = made[[*read.values()]]
        return made

    return lambda: alter


ENGINE_FAULTS = (
    engine("row-of-another", "llama", "a row of a layer's output is the row before it",
           "gathered_rows", "L1.out", alter=read_from("out", 1, {20: 19})),
    engine("rows-of-others", "qwen2", "three rows of an MLP's output are other tokens'",
           "gathered_rows", "L0.ffn_out", fine=True,
           alter=read_from("ffn_out", 0, {3: 9, 12: 11, 20: 2})),
)  # fmt: skip
