"""The measures of two arrays by the native kernel, by numpy, and by exact fractions.

Seen red: the share beyond a step not counted, the largest distance of a later piece taken though it
is smaller, the steps of a part cut at the wrong block or of a padded row as of whole ones, and half
the spacing of 0.5 at a zero; of capture points, runs halved at another place, the norm of all of
the reference, and a NaN on both sides counted as a difference.
"""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.codecs import CODECS, encode
from aprfmt.codecs.row_codec import RowCodec
from aprfmt.errors import CodecError
from aprfmt.measure import bounds, distances, numbers
from aprfmt.measure.distances import PointDistance, measure_values
from aprfmt.measure.numbers import PIECE, PairSums
from aprfmt.measure.tensors import _float_half_spacing
from tests.codecs.levels import level, native
from tests.conversion.folders import write_mixed

__all__ = ["level"]

SUMS = ("aa", "bb", "ab", "dd")
EXACT = ("count", "changed", "ulp", "beyond", "max_abs", "off", "known", "max_index", "nan_a",
         "nan_b", "inf_a", "inf_b")  # fmt: skip


def measured(x: Any, y: Any, step: Any, by_kernel: bool) -> PairSums:
    found = PairSums(x.shape)
    steps = None if step is None else (
        lambda part: step[part] if isinstance(step, np.ndarray) else step)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        if not by_kernel:
            patch.setattr(numbers, "native_kernels", lambda: None)
        found.add(x, y, steps)
    return found


def hard(seed: int, size: int, how: str) -> tuple[Any, Any]:
    """Two float32 arrays that meet every branch, most of whose values are equal or near."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(2, size) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    y = x.copy()
    at = rng.integers(0, max(size, 1), size // 3)
    if how == "near":
        y[at] = np.nextafter(y[at], np.float32(np.inf))
    elif how == "far":
        y[at] *= rng.choice(np.array([-1, 0, 2, 1e30, 1e-30], np.float32), at.size)
        x[at[: at.size // 2]] = 0.0
        y[at[: at.size // 4]] = -0.0
    elif how == "tiny":
        x *= np.float32(1e-42)
        y[at] *= np.float32(1e-40)
    elif how == "odd" and size:
        y[at] = rng.choice(np.array([np.nan, np.inf, -np.inf, 3], np.float32), at.size)
    return x, y


STEPS = ("none", "zero", "one", "single", "double")


def steps_of(kind: str, seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed + 1)
    some = rng.choice([0.0, np.nan, np.inf, 1e-3, 0.5, 7.0], size)
    return {"none": None, "zero": 0.0, "one": 0.25, "single": some.astype(np.float32),
            "double": some}[kind]  # fmt: skip


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("how", ["equal", "near", "far", "tiny", "odd"])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4099, PIECE, 2 * PIECE + 5])
def test_the_kernel_measures_what_numpy_does(how: str, kind: str, size: int) -> None:
    x, y = hard(size + len(how), size, how)
    step = steps_of(kind, size, size)
    ours, theirs = (measured(x, y, step, by_kernel) for by_kernel in (True, False))
    assert {name: getattr(ours, name) for name in EXACT} == {
        name: getattr(theirs, name) for name in EXACT
    }
    for name in SUMS:
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-12), name
    assert repr(ours.odd.result(x.shape)) == repr(theirs.odd.result(x.shape))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(finite, finite), max_size=40))
def test_the_kernel_measures_what_fractions_give(pairs: list[tuple[float, float]]) -> None:
    x, y = (np.array([pair[i] for pair in pairs], np.float32) for i in (0, 1))
    found = native.distances(x, y, None, -1.0)
    changed, _, dd, aa, bb, ab, most, at, _, _ = found
    exact = [(Fraction(float(a)), Fraction(float(b))) for a, b in zip(x, y, strict=True)]
    apart = [abs(a - b) for a, b in exact]
    assert changed == sum(one != 0 for one in apart)
    distances = [float(one) for one in apart]  # to the nearest, as a subtraction rounds
    assert most == max(distances, default=0.0)
    assert at == (distances.index(most) if pairs else -1)
    for sum_, products in (
        (aa, [a * a for a, _ in exact]), (bb, [b * b for _, b in exact]),
        (dd, [one * one for one in apart]),
    ):  # fmt: skip
        assert sum_ == pytest.approx(float(sum(products)), rel=1e-13)
    assert abs(ab - float(sum(a * b for a, b in exact))) <= 1e-13 * math.sqrt(aa) * math.sqrt(bb)


def test_every_level_gives_the_same_bits() -> None:
    x, y = hard(3, 100_003, "far")
    step = np.random.default_rng(4).uniform(0, 1, x.size).astype(np.float32)
    found = set()
    for name in native.LEVELS:
        native.force(name)
        found.add(native.distances(x, y, step, -1.0))
    native.force("best")
    assert len(found) == 1 and len(native.LEVELS) >= 1


def test_what_does_not_fit_is_refused() -> None:
    x = np.ones(8, np.float32)
    with pytest.raises(CodecError, match="found 7 numbers for 8"):
        native.distances(x, x[:7].copy(), None, -1.0)
    for steps in (np.ones(7, np.float32), np.ones(8, np.int16)):
        with pytest.raises(CodecError, match="expected float32 or float64 of 8 elements"):
            native.distances(x, x, steps, -1.0)


@pytest.mark.parametrize("x", [1.0, -3.5, 2.0**-14, 2.0**-24, 0.0])
@pytest.mark.parametrize("steps", [0, 1, 3, 70])
def test_ulps_are_counted_in_the_type_of_both_tensors(x: float, steps: int) -> None:
    """numpy and torch step from one value to the next; F16's smallest numbers are subnormal."""
    torch = pytest.importorskip("torch")
    half = np.float16(x)
    brain = torch.tensor(x, dtype=torch.bfloat16)
    for _ in range(steps):
        half = np.nextafter(half, np.float16(np.inf))
        brain = torch.nextafter(brain, torch.tensor(math.inf, dtype=torch.bfloat16))
    for name, other in (("F16", float(half)), ("BF16", float(brain))):
        pair = np.full(5, x, np.float32), np.full(5, other, np.float32)
        for by_kernel in (True, False):
            sums = PairSums((5,), name)
            if by_kernel:
                sums.add(*pair)
            else:
                sums._room = np.empty((4, 5))
                sums._add_piece(*pair, None)
            assert sums.stats().ulp == steps, (name, by_kernel)


def test_steps_are_asked_for_where_values_differ_alone() -> None:
    """Of five pieces the second and fourth differ; after each one is asked for in vain."""
    x = np.random.default_rng(0).normal(size=5 * PIECE).astype(np.float32)
    y = x.copy()
    asked: list[int] = []
    y[PIECE + 3] += 1
    y[4 * PIECE - 1] += 1
    for by_kernel in (True, False):
        asked.clear()

        def steps(part: slice) -> float:
            asked.append(part.start // PIECE)
            return 2.0

        found = PairSums(x.shape)
        with pytest.MonkeyPatch.context() as patch:
            if not by_kernel:
                patch.setattr(numbers, "native_kernels", lambda: None)
            found.add(x, y, steps)
        assert {1, 3} <= set(asked) <= {1, 2, 3, 4} and found.changed == 2
        assert found.off == pytest.approx(0.5) and found.beyond == 0 and found.known
    unknown = PairSums(x.shape)
    unknown.add(x, y, lambda part: None)
    assert not unknown.known


BLOCKS = 6


@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_steps_of_a_part_are_those_of_the_whole(name: str) -> None:
    row = CODECS[name].row
    columns = 2 * max(row.block_size, 256)
    rng = np.random.default_rng(7)
    if isinstance(CODECS[name], RowCodec):
        size = row.row_bytes((columns,))
        assert size is not None
        raw: Any = {"": rng.integers(0, 256, BLOCKS * size, np.uint8).tobytes()}
    else:
        try:
            raw = encode(name, rng.normal(size=(BLOCKS, columns)).astype(np.float32))
        except (CodecError, NotImplementedError):
            size = BLOCKS * columns // row.block_size * row.type_size
            raw = {"": rng.integers(0, 256, size, np.uint8).tobytes()}
    count = BLOCKS * columns
    with np.errstate(all="ignore"):
        whole = bounds.quantization_steps(name, raw, count)
        parts = [
            bounds.quantization_steps(name, raw, count, slice(start, stop), columns=columns)
            for start, stop in ((0, columns), (columns, 3 * columns), (columns, count), (3, 77))
        ]
    if whole is None:
        assert parts == [None] * 4
        return
    for part, found in zip(
        (slice(columns), slice(columns, 3 * columns), slice(columns, count), slice(3, 77)),
        parts, strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(found, whole[part])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_the_steps_of_padded_rows_are_each_rows_own(name: str) -> None:
    """Rows of 300 columns in two blocks each, of which the second is padded."""
    row = CODECS[name].row
    rng = np.random.default_rng(1)
    raw = [rng.integers(0, 60, 2 * row.type_size, np.uint8).tobytes() for _ in range(3)]
    with np.errstate(all="ignore"):
        each = [bounds.quantization_steps(name, {"": one}, 512) for one in raw]
        found = bounds.quantization_steps(
            name, {"": b"".join(raw)}, 900, columns=300, row_bytes=2 * row.type_size
        )
        some = bounds.quantization_steps(
            name, {"": b"".join(raw)}, 900, slice(290, 610), columns=300,
            row_bytes=2 * row.type_size,
        )  # fmt: skip
    assert found is not None and some is not None
    np.testing.assert_array_equal(found, np.concatenate([one[:300] for one in each]))  # type: ignore[index]
    np.testing.assert_array_equal(some, found[290:610])


@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_the_step_of_a_half_float_is_half_its_spacing(wide: Any) -> None:
    """numpy's own spacing of float16, at its numbers, between them, near zero and at zero."""
    rng = np.random.default_rng(0)
    numbers_ = np.concatenate(
        [rng.normal(size=500) * 10.0 ** rng.integers(-9, 4, 500), [0.0, -0.0]]
    )
    values = numbers_.astype(wide)
    below = np.abs(values).astype(np.float16)
    below = np.where(below.astype(wide) > np.abs(values), np.nextafter(below, np.float16(0)), below)
    expected = np.spacing(below).astype(np.float64) / 2
    np.testing.assert_array_equal(_float_half_spacing("F16", values), expected)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_a_number_in_the_place_of_a_zero_is_no_rounding(name: str, tmp_path: Path) -> None:
    """No rounding makes a thousandth of a zero."""
    from aprfmt.compare import diff_models
    from aprfmt.model import open_model

    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    x[3, 5] = 0.0
    verdicts = []
    for wrong in (0.0, 0.0002):
        y = x.copy()
        y[3, 5] = wrong
        data = encode(name, y)[""]
        paths = tmp_path / f"a{wrong}.safetensors", tmp_path / f"b{wrong}.safetensors"
        write_mixed(paths[0], {"w": ("F32", (8, 64), x.tobytes())})
        write_mixed(paths[1], {"w": (name, (8, 64), data)})
        with open_model(paths[0]) as one, open_model(paths[1]) as other:
            verdicts.append(diff_models(one, other, explain=False).tensors[0].verdict)
    assert verdicts == ["WITHIN", "DIFFERENT"]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("other", ["float64", "float16", "int32"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", ["equal", "near"])
def test_arrays_of_two_types_are_measured_as_numpy_does(how: str, turned: bool, other: str) -> None:
    """The kernel takes float32 on both sides only."""
    x, y = hard(5, 4099, how)
    wide = y.astype(other)
    pair = (wide, x) if turned else (x, wide)
    ours, theirs = (measured(*pair, 0.25, by_kernel) for by_kernel in (True, False))
    assert all(getattr(ours, name) == getattr(theirs, name) for name in (*EXACT, *SUMS))
    apart = np.abs(x.astype(np.float64) - wide.astype(np.float64))
    assert ours.changed == np.count_nonzero(apart) and ours.max_abs == apart.max()


def point_distances(x: Any, y: Any, by_kernel: bool) -> PointDistance:
    """Return the distances of two flat arrays of a point."""
    with pytest.MonkeyPatch.context() as patch:
        if not by_kernel:
            patch.setattr(distances, "native_kernels", lambda: None)
        found = measure_values(x, y, None, x.shape)
    assert found is not None
    return found


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("how", ["equal", "near", "far", "tiny", "odd"])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 127, 128, 129, 136, 255, 1000, 4099, 100_003])
def test_points_are_measured_as_numpy_does_to_the_bit(how: str, size: int) -> None:
    x, y = hard(size + len(how), size, how)
    for pair in ((x, y), (y, x), (x[::-1], y[::-1])):
        assert repr(point_distances(*pair, True)) == repr(point_distances(*pair, False))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("at", [0, 7, 8, 127, 128, 600])
@pytest.mark.parametrize("one", [np.nan, np.inf, -np.inf, 1.0])
@pytest.mark.parametrize("other", [np.nan, np.inf, -np.inf, 2.0])
def test_one_odd_value_of_a_point_is_found_where_numpy_finds_it(
    at: int, one: float, other: float
) -> None:
    x = np.linspace(-1, 1, 601, dtype=np.float32)
    y = x.copy()
    y[300] += 1
    x[at], y[at] = one, other
    found = point_distances(x, y, True)
    assert repr(found) == repr(point_distances(x, y, False))
    alike = one == other or (np.isnan(one) and np.isnan(other))
    alone = not alike and not (np.isfinite(one) and np.isfinite(other))
    assert (found.nonfinite is not None and found.nonfinite.alone == 1) == alone
    assert found.at == (at if alone else 300 if alike else min(at, 300),)


@pytest.mark.usefixtures("level")
def test_numbers_of_other_counts_are_refused() -> None:
    x = np.zeros(9, np.float32)
    with pytest.raises(CodecError, match="apart: found 8 numbers for 9"):
        native.apart(x, x[:8])
