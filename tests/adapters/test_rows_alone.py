"""Rows of a merged weight: each part is that of the whole, with DoRA's lengths of its own rows."""

import numpy as np
import pytest

from aprfmt.adapters.merging import merge_rows
from aprfmt.adapters.placing import LowRank

RNG = np.random.default_rng(8)


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (4, 9), (3, 4), (9, 12), (0, 12)])
def test_a_part_has_the_rows_of_the_whole(start: int, stop: int, lengths: bool) -> None:
    weight = RNG.normal(size=(12, 6)).astype(np.float32)
    a, b = RNG.normal(size=(2, 6)), RNG.normal(size=(12, 2))
    magnitude = RNG.uniform(1, 3, 12) if lengths else None
    pair = LowRank(a, b, 0.5, magnitude)
    full = weight + 0.5 * (b @ a)
    if magnitude is not None:
        full = full * (magnitude / np.linalg.norm(full, axis=1))[:, None]
    found = merge_rows(weight[start:stop], pair, start, stop)
    assert found.dtype == np.float32
    assert np.allclose(found, full[start:stop], rtol=1e-5, atol=1e-6)
