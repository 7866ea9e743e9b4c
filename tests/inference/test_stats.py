"""The statistics function against numpy, and joined statistics against joined values.

Seen red: divisor n - 1 for std, only negative zeros counted, a chunk with a NaN dropped whole.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aprfmt.codecs import native_kernels
from aprfmt.tensors.stats import (
    CHUNK,
    PART,
    Accumulator,
    compute_stats,
    compute_stats_of_parts,
    merge_stats,
)


@pytest.fixture(params=["native", "numpy"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything by the kernel, where it is built, and by the numpy reference."""
    if request.param == "numpy":
        monkeypatch.setattr("aprfmt.tensors.stats.native_kernels", lambda: None)
    elif native_kernels() is None:
        pytest.skip("NOT-RUN: the extension is not built")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(max_dims=3, max_side=9),
        elements=st.floats(-1e6, 1e6, width=32),
    )
)
def test_equals_numpy_in_float64(values: np.ndarray) -> None:
    wide = values.astype(np.float64)
    stats = compute_stats(values)
    scale = float(np.abs(wide).max()) + 1e-30
    assert stats.count == stats.finite == values.size
    assert stats.mean == pytest.approx(wide.mean(), rel=1e-12, abs=1e-12 * scale)
    assert stats.std == pytest.approx(wide.std(), rel=1e-6, abs=1e-9 * scale)
    assert stats.l2 == pytest.approx(np.linalg.norm(wide), rel=1e-7, abs=1e-9 * scale)
    assert (stats.min, stats.max) == (wide.min(), wide.max())
    assert stats.absmax == np.abs(wide).max()
    assert stats.zeros == np.count_nonzero(values == 0)


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    stats = compute_stats(np.array([np.nan, np.inf, -np.inf, -0.0, 3.0], np.float32))
    assert (stats.nan, stats.inf, stats.zeros, stats.finite) == (1, 2, 1, 2)
    assert (stats.mean, stats.std, stats.min, stats.max) == (1.5, 1.5, 0.0, 3.0)
    nothing = compute_stats(np.array([np.nan, np.inf]))
    assert nothing.mean is nothing.std is nothing.min is nothing.l2 is None
    assert compute_stats(np.zeros((0, 4))).count == 0


def test_a_constant_has_no_deviation_and_a_large_mean_does_not_hide_one() -> None:
    assert compute_stats(np.full(100_000, np.float32(0.1))).std == 0.0
    values = 1e4 + np.random.default_rng(0).standard_normal(200_000) * 1e-3
    assert compute_stats(values).std == pytest.approx(values.std(), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.bool_, ml_dtypes.bfloat16])
def test_takes_every_real_dtype(dtype: type) -> None:
    values: np.ndarray = np.array([0, 1, 1, 0, 1]).astype(dtype)
    stats = compute_stats(values)
    assert stats.mean == pytest.approx(0.6)
    assert (stats.zeros, stats.max) == (2, 1.0)


def test_complex_numbers_count_twice() -> None:
    assert compute_stats(np.array([3 + 4j], np.complex64)).l2 == 5.0


def test_pieces_and_joined_statistics_equal_the_whole() -> None:
    """The figures of a fused q|k|v follow from its parts, as the requirements compute them."""
    random = np.random.default_rng(1)
    sizes = [(3584, 3.258061, 0.127345), (512, 29.464621, 1.549082), (512, 0.186556, 0.005926)]
    parts = [random.standard_normal(n) * s + m for n, s, m in sizes]
    whole = compute_stats(np.concatenate(parts))
    accumulator = Accumulator()
    for part in parts:
        accumulator.add(part)
    for joined in (accumulator.result(), merge_stats(compute_stats(part) for part in parts)):
        assert joined.count == whole.count
        assert joined.mean == pytest.approx(whole.mean, rel=1e-12)
        assert joined.std == pytest.approx(whole.std, rel=1e-12)
        assert joined.l2 == pytest.approx(whole.l2, rel=1e-12)


def test_more_than_one_chunk_is_joined() -> None:
    values = np.random.default_rng(2).standard_normal(3 * CHUNK + 7).astype(np.float32)
    stats = compute_stats(values)
    assert stats.mean == pytest.approx(values.astype(np.float64).mean(), rel=1e-10)
    assert stats.std == pytest.approx(values.astype(np.float64).std(), rel=1e-12)


def test_json_says_which_divisor() -> None:
    assert compute_stats(np.ones(3)).to_json()["std_divisor"] == "n"


@pytest.mark.parametrize("odd", [None, np.nan, np.inf, 0.0, -0.0])
@pytest.mark.parametrize("count", [0, 1, PART - 1, PART, PART + 1, 3 * PART + 77])
def test_pieces_give_the_statistics_of_the_whole(count: int, odd: float | None) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    if odd is not None:
        x[count // 2 :] = odd
    found = compute_stats_of_parts(x[at : at + PART] for at in range(0, count, PART))
    assert repr(found) == repr(compute_stats(x))  # to the bit, NaN and the sign of zero included


@pytest.mark.parametrize("sizes", [(PART + 1,), (5, 5), (PART, 5, PART)])
def test_pieces_of_other_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"expected {PART}"):
        compute_stats_of_parts(np.ones(size, np.float32) for size in sizes)
