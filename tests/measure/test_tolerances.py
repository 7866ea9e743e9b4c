"""What two values of a point are held to, and what two traces have to share to be compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.errors import UsageError
from aprfmt.inference.replay.shadow import ShadowPoint
from aprfmt.measure import tensors, traces
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.tolerances import BASE, MOE_FACTOR, SMALLEST_BUG, run_tolerance
from aprfmt.measure.traces import compare_traces


@dataclass(frozen=True)
class OneRecord:
    """A recorded point of all rows."""

    key: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    stats: Any = None

    @property
    def point(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(range(self.shape[0]))


@dataclass(frozen=True)
class OneTrace:
    """A trace held in memory, of one point."""

    held: np.ndarray
    ids: tuple[int, ...] = (1, 2, 3)
    resolution: float = 0.0
    key: str = "L0.ffn_out"
    backend: Mapping[str, Any] = field(default_factory=lambda: {"backend": "numpy"})

    @property
    def run(self) -> Mapping[str, Any]:
        return {"ids": list(self.ids), "backend": self.backend}

    @property
    def records(self) -> Mapping[str, OneRecord]:
        return {self.key: OneRecord(self.key, self.held.shape)}

    def find_record(self, key: str) -> OneRecord | None:
        return self.records.get(key)

    def unread_values(self, name: str) -> None:
        return None

    def slot_parts(self, key: str) -> list[str]:
        return [key]

    def recorded_values(self, key: str) -> np.ndarray:
        return self.held

    def values_mask(self, key: str) -> None:
        return None

    def value_blocks(self, key: str) -> None:
        return None


VALUES = np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32)


def test_experts_widen_no_bound_that_a_bug_would_fit_into() -> None:
    for dtype in BASE:
        plain, routed = (run_tolerance(dtype, dtype, moe=moe).rel_l2 for moe in (False, True))
        assert routed in (plain, plain * MOE_FACTOR)
        assert (routed == plain) == (plain < SMALLEST_BUG), dtype


def test_a_tenth_is_wrong_in_every_arithmetic() -> None:
    for dtype in BASE:
        assert run_tolerance(dtype, "float32").rel_l2 < 0.1


@pytest.mark.parametrize("printed", ["this", "reference"])
def test_decimals_that_one_side_was_printed_to_count_on_either_side(printed: str) -> None:
    exact, rounded = OneTrace(VALUES), OneTrace(VALUES.round(3), resolution=1e-3)
    a, b = (rounded, exact) if printed == "this" else (exact, rounded)
    found = compare_traces(a, b)
    assert found.first is None and found.exit_code == 0
    assert compare_traces(exact, OneTrace(VALUES.round(3))).first == exact.key


def test_traces_of_other_tokens_are_not_compared() -> None:
    with pytest.raises(UsageError, match="the first difference at 1"):
        compare_traces(OneTrace(VALUES), OneTrace(VALUES, ids=(1, 9, 3)))


@pytest.mark.parametrize(
    ("residual", "flagged"), [(1e-5, False), (1e-3, True), (1e-1, True), (float("nan"), True)]
)
def test_one_operation_is_held_to_the_bound_of_one(residual: float, flagged: bool) -> None:
    view = ShadowPoint("L0.q", "q", 0, VALUES, None, residual, 1e-4, 1e-2, ())
    assert view.flagged is flagged


FLOATS: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


FINFO: Any = ml_dtypes.finfo  # which has no types


@pytest.mark.parametrize("name", FLOATS)
def test_steps_of_float_types_are_those_of_ml_dtypes(name: str) -> None:
    facts = FINFO(FLOATS[name])
    assert UNIT[name] == float(facts.eps) / 2
    assert tensors._FLOATS[name] == (facts.nmant, facts.minexp)


def test_every_float_type_is_held_to_it() -> None:
    assert set(FLOATS) == set(UNIT) == set(tensors._FLOATS)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_rows_are_as_far_apart_as_their_share_of_the_reference(size: float) -> None:
    """Row by row as numpy's norms; of a row of zeros nothing but zeros is near."""
    rng = np.random.default_rng(4)
    x, y = (size * rng.standard_normal((6, 2, 5)) for _ in range(2))
    y[1], x[2], y[3] = x[1], 0, 0
    x[4] = y[4] = 0
    kept = rng.random(x.shape) < 0.6
    kept[5] = False
    for chosen in (None, kept):
        there = np.ones(x.shape, bool) if chosen is None else chosen
        found = traces._distances_of_rows(x, y, chosen)
        for row, value in enumerate(found):
            a, b = x[row][there[row]], y[row][there[row]]
            if not a.size:
                assert value is None
                continue
            apart, whole = np.linalg.norm(a - b), np.linalg.norm(b)
            wanted = 0.0 if apart == 0 else np.inf if whole == 0 else apart / whole
            assert value == pytest.approx(wanted)
