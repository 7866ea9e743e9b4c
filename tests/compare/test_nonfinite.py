"""A NaN or an infinity on one side is a bug with place, index and count; it is never rounding.

Seen red: `rounding (confirmed)` with a residual of inf and exit 0, WITHIN by the mean square error
of the other values, the same NaN on both sides reported as a difference.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.conversion import convert
from aprfmt.diagnosis.conclusion import rounding_finding
from aprfmt.diagnosis.finding_effects import Share
from aprfmt.diagnosis.model_pair import finalize_finding
from aprfmt.diagnosis.records import PointRow
from aprfmt.inference.parity.outcomes import compare_logits
from aprfmt.inference.replay.recorded_trace import finite_rel_l2, fit_values
from aprfmt.inference.replay.shadow import OperationResiduals
from aprfmt.measure.distances import measure_values, rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.nonfinite import Census, count_nonfinite
from aprfmt.measure.numbers import PairSums, steps_between
from aprfmt.model import open_model
from tests.cli.run import Done, aprfmt
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.models import IDS

WRONG = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
UP, KEY, AT = "model.layers.1.mlp.up_proj.weight", "L1.ffn_up.weight", (3, 5)
TOKENS = ("--ids", ",".join(map(str, IDS)))
Edit = Callable[[Any], None]


def alone(found: Any, at: tuple[int, ...], count: int, side: str = "b") -> None:
    """Assert what JSON says of a place: index, how many, and on which side."""
    assert found is not None
    assert (found["alone"], tuple(found["at"]), found[side]) == (count, at, count)
    assert found["a" if side == "b" else "b"] == 0


def sentence(at: tuple[int, ...], count: int, total: int) -> str:
    return f"at {count} of {total} values (A has 0, B {count}), the first at {list(at)}"


# --- weights ------------------------------------------------------------------------------------


@cache
def folder(name: str, encoding: str, value: float | None = None) -> Path:
    """Return the tiny llama with one weight stored in `encoding`, one of its elements changed."""

    def change(rows: files.Rows) -> None:
        x = files.values(rows, UP)
        if value is not None:
            x[AT] = value
        with np.errstate(over="ignore"):
            stored = x.astype(DTYPES[encoding])
        rows[UP] = (encoding, tuple(x.shape), stored.tobytes())

    return files.copy(tiny_folder("llama"), f"nonfinite-{name}-{encoding}", tensors=change)


def tensor(done: Done, key: str = KEY) -> Any:
    return next(row for row in done.json["tensors"] if row["key"] == key)


@pytest.mark.parametrize(
    ("encodings", "wrong"),
    [
        ("F32 F32", "nan"), ("F16 F16", "inf"), ("BF16 BF16", "-inf"), ("F32 F16", "nan"),
        ("F32 BF16", "inf"), ("BF16 BF16", "nan"), ("F16 BF16", "-inf"), ("F32 F16", "inf"),
    ],
)  # fmt: skip
def test_one_element_of_one_side(encodings: str, wrong: str) -> None:
    first, second = encodings.split()
    a, b = folder("whole", first), folder(wrong, second, WRONG[wrong])
    size = 72 * 48
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        done = aprfmt("diff", x, y, "--json", "--accept", "within")
        row = tensor(done)
        assert (done.code, row["verdict"]) == (1, "DIFFERENT")
        alone(row["stats"]["nonfinite"], AT, 1, side)
        assert row["explanation"]["cause"] in ("nonfinite", "bit_rot")
        if side == "a":
            continue
        found = aprfmt("diagnose", x, y, *TOKENS, "--json")
        assert (found.code, found.json["verdict"]) == (1, "bug")
        assert found.json["cause"] in ("nonfinite", "bit_rot") and KEY in found.json["where"]
        alone(found.json["findings"][0]["values"]["nonfinite"][KEY], AT, 1, side)
    said = sentence(AT, 1, size)
    assert said in aprfmt("diff", a, b).out
    told = aprfmt("diagnose", a, b, *TOKENS, "-v").out
    assert f"{KEY}: NaN or infinity on one side {said}" in told and wrong in told


@pytest.mark.parametrize("value", [1e6, -7e4])
def test_a_value_that_overflowed_in_the_coarser_type_is_no_rounding(value: float) -> None:
    """Rounding A to F16 gives B's infinity, bit for bit; it must still not count as rounding."""
    a, b = folder(f"large{value}", "F32", value), folder(f"large{value}", "F16", value)
    row = tensor(aprfmt("diff", a, b, "--json"))
    assert row["verdict"] == "DIFFERENT" and row["explanation"]["cause"] == "nonfinite"
    alone(row["stats"]["nonfinite"], AT, 1)
    done = aprfmt("diagnose", a, b, *TOKENS, "--json")
    assert (done.code, done.json["verdict"], done.json["cause"]) == (1, "bug", "nonfinite")
    assert [row["cause"] for row in done.json["findings"] if row["confidence"] == "confirmed"] == [
        "nonfinite"
    ]


@pytest.fixture(scope="module")
def quantized(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    into = tmp_path_factory.mktemp("nonfinite")
    found = {}
    for name in ("Q8_0", "Q4_K", "IQ4_NL"):
        found[name] = into / f"{name}.gguf"
        convert(demo_model, found[name], encoding=name)
    return found


@pytest.mark.parametrize(
    ("encoding", "block", "wrong"),
    [("Q8_0", 32, "nan"), ("Q8_0", 32, "-inf"), ("Q4_K", 256, "nan"), ("Q4_K", 256, "inf"),
     ("IQ4_NL", 32, "nan")],
)  # fmt: skip
def test_the_scale_of_one_block(
    encoding: str,
    block: int,
    wrong: str,
    quantized: dict[str, Path],
    demo_model: Path,
    tmp_path: Path,
) -> None:
    """The file against its undamaged copy, and against its source, where the bound must fail."""
    broken = tmp_path / "b.gguf"
    data = bytearray(quantized[encoding].read_bytes())
    with open_model(quantized[encoding]) as model:
        info = model["blk.1.ffn_up.weight"].stored[0].info
    per_row = info.nbytes // info.shape[0]
    start = info.offset + 3 * per_row
    data[start : start + 2] = np.float16(WRONG[wrong]).tobytes()
    broken.write_bytes(data)
    for other in (quantized[encoding], demo_model):
        done = aprfmt("diff", other, broken, "--json", "--accept", "within")
        row = tensor(done)
        assert (done.code, row["verdict"]) == (1, "DIFFERENT")
        found = row["stats"]["nonfinite"]
        assert found["alone"] == found["b"] and 0 < found["alone"] <= block
        assert found["at"][0] == 3 and found["at"][1] < block
        assert tensor(done, "L0.ffn_up.weight")["verdict"] in ("SAME_BYTES", "WITHIN")
        told = aprfmt("diagnose", other, broken, *TOKENS, "-v")
        assert told.code == 1 and told.out.startswith("bug: ")
        assert f"{KEY}: NaN or infinity on one side at {found['alone']} of" in told.out


def test_the_same_on_both_sides_is_no_difference_and_is_named() -> None:
    """Other encodings, so that values are compared; the NaN stands in both at one place."""
    a, b = folder("nan", "F32", math.nan), folder("nan", "BF16", math.nan)
    done = aprfmt("diff", a, b, "--json", "--accept", "within")
    row = tensor(done)
    assert (done.code, row["verdict"]) == (0, "WITHIN")
    found = row["stats"]["nonfinite"]
    assert (found["alone"], found["both"], found["both_at"]) == (0, 1, list(AT))
    said = f"NaN or infinity on both sides alike at 1 of {72 * 48} values, the first at {list(AT)}"
    assert said in aprfmt("diff", a, b).out and said in aprfmt("diagnose", a, b, *TOKENS, "-v").out
    equal = aprfmt("diff", a, folder("nan2", "F32", math.nan), "--json")
    assert equal.code == 0 and tensor(equal)["verdict"] == "SAME_BYTES"
    other = aprfmt("diff", folder("inf", "F32", math.inf), a, "--json")
    assert other.code == 1 and tensor(other)["stats"]["nonfinite"]["values"] == ["inf", "nan"]


def test_what_leaves_the_function_as_it_is_is_not_shown_by_what_is_no_number() -> None:
    """Neurons reordered in all tensors, one of them NaN: not `the function is equal`."""
    order = np.random.default_rng(0).permutation(72)

    def broken(rows: files.Rows) -> None:
        x = files.values(rows, UP)
        x[AT] = math.nan
        rows[UP] = ("F32", tuple(x.shape), x.tobytes())

    def turned(rows: files.Rows) -> None:
        broken(rows)
        for name in ("gate", "up", "down"):
            key = f"model.layers.1.mlp.{name}_proj.weight"
            x = files.values(rows, key)
            x = np.ascontiguousarray(x[:, order] if name == "down" else x[order])
            rows[key] = ("F32", tuple(x.shape), x.tobytes())

    a = files.copy(tiny_folder("llama"), "nonfinite-turn-a", tensors=broken)
    b = files.copy(tiny_folder("llama"), "nonfinite-turn-b", tensors=turned)
    row = tensor(aprfmt("diff", a, b, "--json"))
    assert row["verdict"] == "DIFFERENT" and row["explanation"]["cause"] != "permuted_neurons"
    assert aprfmt("diagnose", a, b, *TOKENS).code == 1


# --- every place that holds a distance to a bound -----------------------------------------------


def sides(value: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)
    y = x.copy()
    y[1, 2] = value
    return x, y


@pytest.mark.parametrize("wrong", WRONG)
def test_distances_fail_on_one_side_and_pass_over_both(wrong: str) -> None:
    x, y = sides(WRONG[wrong])
    assert rel_l2(x, y) == rel_l2(y, x) == math.inf
    assert rel_l2(y, y) == 0.0
    near = y.copy()
    near[0, 0] *= 1.5
    assert 0 < rel_l2(near, y) < 1
    found, again = count_nonfinite(x, y), count_nonfinite(y, x)
    assert found is not None and again is not None
    assert (found.alone, found.at, found.side, found.b) == (1, (1, 2), "B", 1)
    assert (again.alone, again.side, again.a) == (1, "A", 1)
    both = count_nonfinite(y, y)
    assert both is not None and (both.alone, both.both, both.both_at) == (0, 1, (1, 2))
    assert count_nonfinite(x, x) is None
    pieces = Census()
    for start in (0, 5):
        end = 5 if start == 0 else 12
        pieces.add(x.reshape(-1)[start:end], y.reshape(-1)[start:end])
    assert pieces.result(x.shape) == found
    assert steps_between(x, y, np.ones(12))[6] == math.inf
    assert steps_between(y, y, np.full(12, np.nan)).max() == 0.0
    # A step that is NaN or infinite gives no bound.
    for step in (np.nan, 0.0):
        assert steps_between(x, x * 2, np.full(12, step)).min() == math.inf
    measures = PairSums(x.shape)
    measures.add(x, y)
    stats = measures.stats()
    assert stats.alone and stats.max_abs_diff == math.inf and stats.max_at == (1, 2)
    logits = compare_logits(x, y, [0, 1, 2], within=True)
    assert logits.rel_l2 == logits.max_abs == math.inf
    assert compare_logits(y, y, [0, 1, 2], within=True).rel_l2 == 0.0


def test_squares_that_overflow_are_no_small_distance() -> None:
    x = np.array([[1e200, 1.0]])
    measures = PairSums(x.shape)
    with np.errstate(over="ignore"):
        measures.add(x, x * 2)
        assert measures.stats().rel_l2 == math.inf and math.isnan(measures.stats().cosine)
        assert rel_l2(x, x * 2) == math.inf


def test_what_is_found_of_nothing_is_infinitely_far_wherever_it_is_asked() -> None:
    """One rule for an all-zero reference: for diff, trace, parity and diagnose."""
    found, nothing = np.array([[3.0, 4.0]]), np.zeros((1, 2))
    measures = PairSums(nothing.shape)
    measures.add(nothing, found)
    everything = np.ones(2, bool), nothing.shape
    assert rel_l2(found, nothing) == finite_rel_l2(found, nothing) == math.inf
    distance = measure_values(found[0], nothing[0], *everything)
    assert distance is not None and distance.rel == math.inf
    assert measures.stats().rel_l2 == math.inf
    assert rel_l2(nothing, found) == rel_l2(found * 0, found) == 1.0
    assert rel_l2(nothing, nothing) == 0.0


def test_a_nan_is_no_masked_score() -> None:
    scores = np.zeros((1, 2, 2), np.float32)
    scores[0, 0, 1], scores[0, 1, 0] = -np.inf, np.nan
    seen = fit_values(scores, None, "float32", scores.shape, 1, 2, masked=True)
    assert seen is not None and seen.mask is not None
    assert seen.mask.tolist() == [[[True, False], [True, True]]]
    assert seen.distance(np.zeros_like(scores), 1) == math.inf
    ours = fit_values(scores, None, "float32", scores.shape, 1, 2, masked=False)
    assert ours is not None and ours.mask is None


def test_no_rounding_without_a_distance() -> None:
    rows = [PointRow("L0.q", "q", 0, math.inf, 1e-7, 2e-5, beyond=True, apart=True)]
    found = rounding_finding(rows, [], [], OperationResiduals({"L0.q": (1e-7, 2e-5)}))
    assert found is not None and found.verdict == "bug" and not found.confirmed
    near = Finding("rounding", "", "tensor", "precision", ("x",), True)
    x, y = sides(math.nan)
    for value in (math.inf, math.nan):
        share = Share(value, 0.0, "L0.q", count_nonfinite(x, y))
        assert finalize_finding(near, share, 2e-5).verdict == "bug"
        assert not finalize_finding(near, share, 2e-5).confirmed
    fine = finalize_finding(near, Share(1e-3, 0.0, "L0.q", None), 2e-5)
    assert fine.verdict == "precision" and fine.confirmed


def test_rounding_beyond_the_bounds_asks_for_operations_that_were_judged() -> None:
    """If no operation was judged, or one is wrong, a difference beyond the bounds is a bug.

    Seen red: an operation that was judged taken for one that is right.
    """
    for beyond, shadow in product((True, False), (None, 1e-7, 1e-3)):
        far = 3e-3 if beyond else 1e-6
        rows = [PointRow("L0.q", "q", 0, far, shadow, 2e-5, beyond=beyond, apart=beyond)]
        judged = OperationResiduals({} if shadow is None else {"L0.q": (shadow, 2e-5)})
        found = rounding_finding(rows, [], [], judged)
        assert found is not None and (found.cause, found.residual_before) == ("rounding", far)
        sure = shadow == 1e-7 or not beyond
        assert (found.verdict, found.confirmed) == (("precision" if sure else "bug"), sure)
        assert (found.proof is not None) == (sure and shadow is not None)
        assert ("rounding, amplified" in found.says) == (beyond and sure)
        assert ("no operation was judged" in found.says) == (not sure and shadow is None)
        assert ("L0.q is wrong on its own input" in found.says) == (not sure and shadow == 1e-3)


def test_rounding_is_proven_by_the_operations_that_were_judged_alone() -> None:
    rows = [
        PointRow(f"L0.{name}", name, 0, 1e-6, shadow, 2e-5)
        for name, shadow in (("q", 1e-7), ("k", None), ("v", None))
    ]
    found = rounding_finding(rows, [], [], OperationResiduals({"L0.q": (1e-7, 2e-5)}))
    assert found is not None and found.proof is not None
    assert found.proof.count == 1


def test_an_arithmetic_that_only_sizes_show_is_never_confirmed() -> None:
    """Near or beyond the bounds, with and without an operation that was judged."""
    for beyond, shadow in product((True, False), (1e-7, 1e-3)):
        rows = [PointRow("L0.q", "q", 0, 3e-3, shadow, 2e-5, beyond=beyond, apart=beyond)]
        judged = OperationResiduals({"L0.q": (shadow, 2e-5)})
        for supposed in ("", "products in bfloat16"):
            found = rounding_finding(rows, [], [], judged, supposed)
            sure = not supposed and (shadow == 1e-7 or not beyond)
            assert found is not None and (found.certainty == "confirmed") == sure
            assert supposed in found.says


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_finite_rest_beside_is_measured_as_numpy_measures_it(wrong: float, dtype: Any) -> None:
    """One element that is no number, on both sides, leaves how far the others are apart."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8, 16)).astype(dtype)
    y = (x.astype(np.float64) * 1.01).astype(dtype)
    x[2, 3] = y[2, 3] = wrong
    sums = PairSums(x.shape)
    sums.add(x, y)
    rest = np.isfinite(x.astype(np.float64))
    a, b = x[rest].astype(np.float64), y[rest].astype(np.float64)
    assert sums.dd == pytest.approx(np.sum((a - b) ** 2), rel=1e-12)
    assert (sums.aa, sums.bb, sums.ab) == pytest.approx((a @ a, b @ b, a @ b), rel=1e-12)


def test_one_operation_that_was_judged_does_not_stand_for_another() -> None:
    """Every point that is beyond its bound has to be judged. Seen red: "rounding, amplified"."""
    rows = [
        PointRow("L0.q", "q", 0, 3e-3, 1e-7, 2e-5, beyond=True, apart=True),
        PointRow("L0.k", "k", 0, 3e-3, None, 2e-5, beyond=True, apart=True),
    ]
    judged = OperationResiduals({"L0.q": (1e-7, 2e-5)})
    for some, verdict in ((rows, "bug"), (rows[1:], "bug"), (rows[:1], "precision")):
        found = rounding_finding(some, [], [], judged)
        assert found is not None and found.verdict == verdict
        assert found.confirmed == (verdict == "precision")


def test_steps_are_counted_beside_values_that_are_not_finite() -> None:
    """A step per element: what is on both sides the same NaN or infinity is none away."""
    x = np.array([1, 2, 3, np.inf, np.nan, -np.inf, np.nan, 8, 9], np.float64)
    y = np.array([1, 2.5, 5, np.inf, np.nan, np.inf, 7, np.inf, 9.25], np.float64)
    for dtype in (np.float64, np.float32):
        measures = PairSums(x.shape)
        measures.add(x.astype(dtype), y.astype(dtype), lambda part: np.full(9, 0.5)[part])
        assert measures.off == math.inf and measures.beyond == 4  # 3 to 5, -inf, NaN and 8
        near = np.isin(np.arange(9), [0, 1, 3, 4, 8])
        measures = PairSums((5,))
        measures.add(
            x[near].astype(dtype), y[near].astype(dtype), lambda part: np.full(5, 0.25)[part]
        )
        assert (measures.off, measures.beyond) == (2.0, 1)
