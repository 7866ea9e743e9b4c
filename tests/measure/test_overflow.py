"""Values beyond a float type: named only where the reference's are, at every place."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.measure.traces import overflow_text

INF, NAN = np.inf, np.nan
TOLERANCE = 0.08
KEY = "L2.ffn_contrib"


def trace(values: Any, dtype: str) -> Any:
    held = None if values is None else np.array(values, np.float32)
    record = SimpleNamespace(key=KEY, dtype=dtype)
    return SimpleNamespace(find_record=lambda key: record, recorded_values=lambda key: held)


def text(mine: Any, theirs: Any, dtype: str = "float16") -> str:
    point: Any = SimpleNamespace(key=KEY, tolerance=TOLERANCE)
    return overflow_text(point, trace(mine, dtype), trace(theirs, "float32"))


@pytest.mark.parametrize(
    ("mine", "theirs", "most", "count", "first"),
    [
        ([1, -INF], [1, -66048], "66048", 1, "[1]"),
        ([INF, INF], [70000, 98304], "98304", 2, "[0]"),
        ([[1, 2], [INF, -INF]], [[1, 2], [1e6, -65600]], "1e+06", 2, "[1, 0]"),
        ([INF, INF], [65000, 66048], "66048", 2, "[0]"),  # the smaller one within rounding
    ],
)
def test_an_overflow_has_its_place_and_the_largest_value(
    mine: Any, theirs: Any, most: str, count: int, first: str
) -> None:
    """Seen red: "the operation that makes L2.ffn_contrib is wrong on equal inputs"."""
    size = np.size(theirs)
    assert text(mine, theirs) == (
        f"{KEY} overflows float16: the reference has values up to {most} there, and the largest "
        f"number of the type is 65504; {count} of {size} values, the first at {first}"
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "dtype"),
    [
        ([NAN, 1], [66048, 1], "float16"),
        ([-INF, 1], [66048, 1], "float16"),
        ([INF, 1], [500, 1], "float16"),
        ([INF, INF], [66048, 500], "float16"),
        ([INF, INF], [65000, 65400], "float16"),
        ([INF, 1], [INF, 1], "float16"),
        ([INF, 1], [66048, 1], "bfloat16"),
        ([2.0, 1], [66048, 1], "float16"),
        (None, [66048, 1], "float16"),
        ([INF, 1], [66048, 1, 1], "float16"),
    ],
)
def test_other_infinities_are_no_overflow(mine: Any, theirs: Any, dtype: str) -> None:
    assert text(mine, theirs, dtype) == ""


def test_no_point_beyond_is_no_overflow() -> None:
    assert overflow_text(None, trace([INF], "float16"), trace([66048], "float32")) == ""
