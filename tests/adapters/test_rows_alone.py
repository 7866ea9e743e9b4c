"""Rows of a merged weight: each part is that of the whole, with DoRA's lengths of its own rows."""

import numpy as np
import pytest

from aprfmt.adapters.merge_faults import Judged, Merge, OtherChange, judge_misplaced
from aprfmt.adapters.merging import merge_rows
from aprfmt.adapters.pair_placement import LowRank

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


@pytest.mark.parametrize(
    ("encoding", "shape", "found"),
    [("F32", (4, 6), True), ("F32", (1, 6), False), ("F32", (4, 1), False), ("Q8_0", (4, 6), True)],
)
def test_another_weights_change_is_one_of_this_shape_in_a_plain_type(
    encoding: str, shape: tuple[int, int], found: bool
) -> None:
    """A change of one row would give B, too, if it were added to every row; packed: by a sum."""
    plain, own, other = RNG.normal(size=(4, 6)), RNG.normal(size=(4, 6)), RNG.normal(size=shape)
    merge = Merge(plain, own, plain + other, encoding, "F32", close=False)
    before = Judged("other", 0.0, 0.0)
    judged = judge_misplaced(merge, before, [OtherChange("v.weight", other)])
    assert judged.says == ("the change of v.weight was added in place of its own" * found)
