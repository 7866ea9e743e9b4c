"""Columns of a point that differ while the others agree, as where a kernel writes a wrong tile.

Seen red: experts whose first columns alone were wrong, and no word of the columns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.inference.probe_ids import choose_ids
from aprfmt.model import open_model
from tests.diagnosis.engines import COARSE, tiny_folder, trace

RNG = np.random.default_rng(5)


def noise(w: Any, rows: Any) -> Any:
    """Return a weight with other values in some rows, which make columns of the product."""
    made = w.copy()
    made[rows] += 0.1 * RNG.standard_normal(made[rows].shape).astype(np.float32)
    return made


# Rows of a weight that are wrong -> what is said of the product's columns, "" for nothing.
ROWS: Mapping[str, tuple[Callable[[int], Any], str]] = {
    "tile": (lambda n: slice(0, 16), "only columns 0-15 of {} differ, the others agree"),
    "last": (lambda n: slice(n - 1, n), "only column {last} of {} differs, the others agree"),
    "two": (lambda n: [2, 3, 9], "only columns 2-3, 9 of {} differ, the others agree"),
    "many": (lambda n: slice(0, n, 4), ""),
    "all": (lambda n: slice(0, n), ""),
}


@pytest.mark.parametrize("key", ["L1.ffn_down.weight", "L0.attn_output.weight"])
@pytest.mark.parametrize("name", ROWS)
def test_the_columns_that_differ_are_said(key: str, name: str) -> None:
    folder = tiny_folder("llama")
    with open_model(folder) as model:
        ids = choose_ids([model.hyper], long=True)[:20]
    sizes: list[int] = []

    def change(held: Any) -> Mapping[str, Any]:
        w = np.asarray(held[key].numpy())
        sizes.append(len(w))
        return {key: noise(w, ROWS[name][0](len(w)))}

    run = trace(folder, f"columns-{name}-{key}", ids=ids, points=COARSE, weights=change)
    said = diagnose(str(folder), str(run)).sentence
    wanted = ROWS[name][1].format(sizes[0], last=sizes[0] - 1)
    assert "located" in said
    assert wanted in said if wanted else "column" not in said
