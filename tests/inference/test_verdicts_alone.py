"""Verdicts on pairs of runs, calibrated bounds and bundles, each from parts of its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.base.outcome import Check, Report
from aprfmt.errors import FormatError
from aprfmt.inference.parity import bundle, calibrate, operations, verdict
from aprfmt.inference.parity.cell import BundledRows
from aprfmt.measure import tolerances


def odd(alone: bool) -> Any:
    return SimpleNamespace(alone=alone, text=lambda one, two: f"NaN of {one}, not of {two}")


def point(key: str, *, beyond: bool = False, bits: bool = False, why: str = "", **more: Any) -> Any:
    given = {"key": key, "beyond": beyond, "bits": bits, "why": why, "nonfinite": None}
    return SimpleNamespace(**given, rel_l2=0.5, tolerance=0.25, reason="float32", **more)


def nonfinite(key: str, alone: bool, *, beyond: bool = False) -> Any:
    made = point(key, beyond=beyond)
    made.nonfinite = odd(alone)
    return made


def diff_of(*points: Any) -> Any:
    first = next((one.key for one in points if one.beyond), None)
    return SimpleNamespace(points=points, compared=len(points), first=first, overflow="")


def report_of(*outcomes: str) -> Report:
    checks: Any = [Check(f"c{i}", one, "w", f"f{i}", "e", "") for i, one in enumerate(outcomes)]  # type: ignore[arg-type]
    return Report("subject", tuple(checks))


RESIDUALS: Any = SimpleNamespace(found={"L0.q": (0.1, 0.5), "L1.q": (0.2, 0.5)}, worst_key="L1.q")
RIGHT = (
    "each of 2 operations gives the reference's value on the run's own inputs, L1.q at 0.2 of 0.5"
)


def judged(
    diff: Any, *outcomes: str, operations: Any = (), amplified: Any = None, flipped: bool = False
) -> tuple[str, str]:
    return verdict.judge_pair(diff, report_of(*outcomes), operations, amplified, flipped, {"a": 1})


def test_what_fails_first_is_the_reason_of_a_bug() -> None:
    far, near, same = point("b", beyond=True), point("a"), point("s", bits=True)
    wrong = SimpleNamespace(key="b", wrong=True)
    good = SimpleNamespace(key="a", wrong=False)
    grown = (
        "b is beyond its tolerance; every operation taken alone is within its own: the difference "
        "was there before, or grew on the way"
    )
    says = "NaN of this run, not of the reference"
    made = "the operation that makes b is wrong on equal inputs"
    for given, answer in (
        ((diff_of(near, far), (good, wrong)), made),
        ((diff_of(near, nonfinite("b", True, beyond=True)), (good, wrong)), f"{made}; {says}"),
        ((diff_of(near, nonfinite("b", False, beyond=True)), (wrong,)), made),
        ((diff_of(near, far), (good,)), grown),
        ((diff_of(near, nonfinite("b", True, beyond=True)), ()), f"b is not finite; {says}"),
        ((diff_of(near, nonfinite("b", False, beyond=True)), ()), grown),
        ((diff_of(nonfinite("a", False), far), (wrong,)), f"finite: a: {says}"),
        ((diff_of(nonfinite("L0.experts", False), far), ()), grown),
        ((diff_of(far, nonfinite("z", False)), ()), grown),
        ((diff_of(near), ()), "c1: f1"),
    ):
        diff, operations = given
        assert judged(diff, "PASS", "FAIL", operations=operations) == ("bug", answer)
    assert judged(diff_of(), "FAIL")[0] == "not_comparable"
    assert judged(diff_of(same, point("x", why="other rows")), "PASS") == (
        "same",
        "every value is equal to the bit",
    )
    assert judged(diff_of(same, near), "PASS", amplified=RESIDUALS, flipped=True) == (
        "precision",
        f"rounding, amplified: None is beyond; {RIGHT}",
    )
    assert judged(diff_of(near), "PASS", flipped=True)[1] == (
        "rounding sent tokens to other experts; 1 points cut"
    )
    assert judged(diff_of(near), "PASS") == (
        "precision",
        "rounding, within tolerance at every point",
    )


def test_points_are_within_or_the_first_beyond_is_named() -> None:
    near, far = point("a"), point("b", beyond=True)
    check = verdict.check_points
    assert check(diff_of(), None, "w").outcome == "NOT_RUN"
    passed = check(diff_of(near, near), None, "w")
    assert (passed.outcome, passed.found) == ("PASS", "2 points within")
    amplified = check(diff_of(near, far), RESIDUALS, "w")
    assert amplified.outcome == "PASS" and amplified.found.endswith(RIGHT)
    assert amplified.found.startswith("1 of 2 points beyond what whole runs may differ by, the fir")
    failed = check(diff_of(near, far, far), None, "w")
    assert (failed.outcome, failed.where) == ("FAIL", "w")
    assert failed.found == "2 of 3 points beyond, the first b at relative L2 0.5"
    assert failed.expected == "at most 0.25 (float32)"
    assert check(diff_of(nonfinite("b", True, beyond=True)), None, "w").found.endswith("reference")


def test_fused_logits_are_held_to_the_reference_step_by_step() -> None:
    logits = np.arange(1.0, 13.0).reshape(4, 3)
    assert verdict.check_fused(None, logits, point("logits"), False, "w") == []
    for apart, amplified, outcome in (
        (0.25, False, "PASS"),
        (0.26, False, "FAIL"),
        (0.26, True, "PASS"),
        (0.26 * tolerances.AMPLIFIED, True, "FAIL"),
    ):
        for beyond in (False, True):
            plain = logits[2:] * (1 + apart)
            (check,) = verdict.check_fused(
                plain, logits, point("logits", beyond=beyond), amplified, "w"
            )
            assert check.outcome == outcome, (apart, amplified)
            todo = "see the points" if beyond else "a fused operation of this run is wrong"
            assert check.todo.startswith(todo if outcome == "FAIL" else "")
            assert bool(check.todo) is (outcome == "FAIL")


def test_a_run_that_is_not_finite_says_where_first() -> None:
    values = np.ones((3, 2))
    values[1, 1] = values[2, 0] = np.nan

    def trace(key: str | None, held: Any) -> Any:
        return SimpleNamespace(nonfinite=key, recorded_values=lambda key: held)

    runs: Any = ((trace(None, values), "x"), (trace("a", values), "y"), (trace("b", None), "z"))
    one, two = verdict.check_finite(runs)
    assert (one.outcome, one.where) == ("FAIL", "y") and two.found == "NaN or infinity first at b"
    assert one.found == "NaN or infinity first at a: 2 of 6 values, the first at [1, 1]"


# --- calibrated bounds --------------------------------------------------------------------------


def test_a_measured_bound_is_a_multiple_of_the_largest_and_never_above_the_tables() -> None:
    pair = ("numpy", "torch")
    table = tolerances.point_threshold("q", pair, ("float32",) * 2, "exact", moe=False)
    least = tolerances.ROUNDOFF["float32"]

    def row(*found: tuple[float, float]) -> Any:
        return calibrate._calibrated_row(pair, "exact", "q", "float32", found, 2, "m", False)

    small = table.rel_l2 / 100
    made = row((small, 1e-9), (small / 2, 2e-9), (small / 4, 0.0))
    assert (made.rel_l2, made.largest, made.runs) == (calibrate.SAFETY * small, small, 3)
    assert made.evidence.endswith(f"largest {small:.3g}, median {small / 2:.3g}")
    assert "5 times the largest of 3 comparisons in 2 sequences of m" in made.evidence
    assert made.max_over_rms == max(calibrate.SAFETY * 2e-9, least)
    assert row((0.0, 0.0)).rel_l2 == row((0.0, 0.0)).max_over_rms == least
    wide = row((table.rel_l2, table.max_over_rms))
    assert (wide.rel_l2, wide.max_over_rms) == (table.rel_l2, table.max_over_rms)


def test_rows_of_calibrated_bounds_are_held_to_the_table_of_their_backends() -> None:
    good: dict[str, Any] = {
        "pair": ["numpy", "torch"],
        "weights": "exact",
        "point": "q",
        "dtype": "float32",
        "evidence": "e",
        "runs": 3,
        "rel_l2": 1e-9,
        "max_over_rms": 1e-8,
        "largest": 0.0,
    }
    found = calibrate._parse_row(good, "x")
    assert (found.pair, found.runs, found.rel_l2) == (("numpy", "torch"), 3, 1e-9)
    for change in (
        {"pair": ["numpy"]},
        {"pair": ["numpy", 1]},
        {"pair": "nt"},
        {"weights": 1},
        {"runs": True},
        {"runs": 1.5},
        {"rel_l2": 0},
        {"rel_l2": float("inf")},
        {"max_over_rms": -1.0},
        {"dtype": "int4"},
        {"largest": "x"},
        {"rel_l2": 1.0},
    ):
        with pytest.raises(FormatError, match=r"^x: "):
            calibrate._parse_row(good | change, "x")
    with pytest.raises(FormatError, match="is no object"):
        calibrate._parse_row([], "x")
    asked: list[Any] = []

    def threshold(point: str, pair: Any, dtypes: Any, weights: str, *, moe: bool) -> Any:
        asked.append((point, pair, dtypes, weights, moe))
        return SimpleNamespace(rel_l2=1e-9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tolerances, "point_threshold", threshold)
        calibrate._parse_row(good | {"rel_l2": 1.0001e-9}, "x")
        with pytest.raises(FormatError, match="above the table's 1e-09; a calibration only narro"):
            calibrate._parse_row(good | {"rel_l2": 1.0002e-9}, "x")
    assert asked[0] == ("q", ("numpy", "torch"), ("float32", "float32"), "exact", True)
    others: Any = ([], {}, {"schema": "other", "rows": []}, {"schema": calibrate.SCHEMA})
    for given in others:
        with pytest.raises(FormatError):
            calibrate.parse_calibration(given, Path("c.json"))
    assert calibrate.parse_calibration({"schema": calibrate.SCHEMA, "rows": [good]}, Path("c")) == (
        found,
    )


# --- bundles ------------------------------------------------------------------------------------


def test_hyperparameters_of_a_bundle_are_bounded_on_both_sides() -> None:
    def read(**given: Any) -> dict[str, Any]:
        return bundle._read_hyper({"n_layers": 1} | given, "llama", "x")

    assert read() == {"n_layers": 1} and bundle._read_hyper({"n_layers": 0}, "llama", "x")
    assert read(unknown=3) == {"n_layers": 1}
    most = bundle.LARGEST
    for value in (most, -most, 0.5):
        assert read(embedding_scale=float(value))["embedding_scale"] == value
    for value in (most * 1.01, -most * 1.01):
        with pytest.raises(FormatError, match="expected at most"):
            read(embedding_scale=float(value))
    for layers in (2, -1, True, 1.0, "1", None):
        with pytest.raises(FormatError, match="expected 0 or 1"):
            read(n_layers=layers)
    assert read(window_layers=[True])["window_layers"] == [True]
    with pytest.raises(FormatError, match="window_layers is not of 1 layers"):
        read(window_layers=[True, True])


def test_weights_are_stored_as_their_bytes_or_as_numbers() -> None:
    class Numbers:
        def __init__(self, values: Any) -> None:
            self.values = values

        def numpy(self) -> Any:
            return self.values

    for dtype, stored, name in (
        ("float32", "float32", "F32"),
        ("float64", "float64", "F64"),
        ("float16", "float32", "F32"),
        ("int64", "int64", "I64"),
        ("int8", "int64", "I64"),
        ("bool", "int64", "I64"),
    ):
        rows: Any = Numbers(np.ones((2, 2), dtype))
        values, encoding = bundle._weight_to_store(rows)
        assert (values.dtype.name, encoding) == (stored, name), dtype
    held = object.__new__(BundledRows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BundledRows, "stored", b"\x01\x02", raising=False)
        patch.setattr(BundledRows, "encoding", "Q8_0", raising=False)
        values, encoding = bundle._weight_to_store(held)
    assert (values.tolist(), values.dtype.name, encoding) == ([1, 2], "uint8", "Q8_0")
    assert bundle._tuples_to_lists({"a": 1}) == {"a": 1}
    assert bundle._tuples_to_lists((1, [2, (3,)])) == [1, [2, [3]]]


def test_a_type_that_is_too_small_is_no_wrong_operation() -> None:
    far = point("b", beyond=True)
    wrong = SimpleNamespace(key="b", wrong=True)
    diff = diff_of(far)
    diff.overflow = "b overflows float16"
    found = judged(diff, "FAIL", operations=[wrong])
    assert found == ("bug", "b overflows float16: run it in bfloat16 or float32")
    diff.overflow = ""
    assert "wrong on equal inputs" in judged(diff, "FAIL", operations=[wrong])[1]


@pytest.mark.parametrize(
    ("cell_key", "key", "own"),
    [
        ("L0.ffn_out", "L2.ffn_contrib", "L2.ffn_out"),
        ("embd", "L3.attn_norm", "L3.in"),
        ("L0.in", "L1.out", "L1.in"),
        ("final_norm", "logits", "final_norm"),
    ],
)
def test_the_inputs_of_an_operation_are_named_in_its_own_layer(
    cell_key: str, key: str, own: str
) -> None:
    """Seen red: an operation of layer 2 was said to read L0.ffn_out."""
    assert operations._key_in_model(cell_key, key) == own
