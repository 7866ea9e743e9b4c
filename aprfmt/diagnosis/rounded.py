"""The arithmetic that the products of a run betray, where its values are recorded in a finer type.

An engine may multiply in TF32 or 16 bits and record float32. Then every product is off by about as
much, on the run's own input; a wrong weight is off alone, a wrong operation is no product.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from aprfmt.compare.bounds import NMSE
from aprfmt.compare.thresholds import ALL_PRODUCTS, products_of
from aprfmt.compare.traced import RecordLike, TraceLike
from aprfmt.diagnosis.shadow import Pass, View
from aprfmt.diagnosis.world import MOVES


def arithmetic(found: Pass) -> str:
    """Return the dtype of the arithmetic that all products of a pass betray, "" for none.

    Only points count whose operations are one product and perhaps its bias. Where weights are
    quantized, values that were never quantized make such errors too: nothing is then said.
    """
    products = [view for view in found.views.values() if _is_product(view)]
    if any(_weight(view).encoding in NMSE for view in products):
        return ""
    if len(products) < ALL_PRODUCTS or not any(view.flagged for view in products):
        return ""
    off = [view.residual or 0.0 for view in products]
    return products_of(max(off), median(off), min(off))


def _weight(view: View) -> Any:
    """Return the weight of a view's product."""
    return next(call.args[1] for call in view.calls if call.op == "linear")


def _is_product(view: View) -> bool:
    """Say whether a view is one product of the run's own values, and perhaps a bias."""
    ops = [call.op for call in view.calls if call.op not in MOVES]
    one = ops.count("linear") == 1 and set(ops) <= {"linear", "add"}
    biased = all(
        getattr(arg, "ndim", 1) == 1 for call in view.calls if call.op == "add"
        for arg in call.args[1:2]
    )  # fmt: skip
    return one and biased and view.residual is not None


class ReadAs:
    """A trace whose values were computed in another arithmetic than they are recorded in."""

    def __init__(self, trace: TraceLike, dtype: str) -> None:
        self._trace = trace
        self.dtype = dtype
        self.records: Mapping[str, Any] = {
            key: replace(record, dtype=dtype)  # type: ignore[type-var]
            for key, record in trace.records.items()
        }

    @property
    def run(self) -> Mapping[str, Any]:
        """Return the trace's own facts."""
        return self._trace.run

    def find(self, key: str) -> RecordLike | None:
        """Return the record of a key, of the other arithmetic."""
        found = self._trace.find(key)
        return None if found is None else replace(found, dtype=self.dtype)  # type: ignore[type-var]

    def parts(self, key: str) -> list[str]:
        """Return the keys that a key stands for."""
        return self._trace.parts(key)

    def values(self, key: str) -> Any:
        """Return the trace's own values."""
        return self._trace.values(key)

    def mask(self, key: str) -> Any:
        """Return which of the values are there."""
        return self._trace.mask(key)

    @property
    def resolution(self) -> float:
        """Return the trace's own."""
        return self._trace.resolution
