"""Infers a run's arithmetic (TF32, 16 bits) from the errors of its products."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any

from aprfmt.inference.replay.patched_model import MOVES
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint
from aprfmt.measure.bounds import NMSE
from aprfmt.measure.tolerances import ALL_PRODUCTS, arithmetic_of_errors
from aprfmt.measure.trace_view import RecordLike, TraceLike, WrappedTrace


def arithmetic_of_products(found: ShadowPass) -> str:
    """Return the dtype whose rounding explains the errors of all matrix products; "" if none does.

    Only points whose operations are one product and perhaps its bias are judged. "" where weights
    are quantized, since a run with the unquantized values has such errors too.
    """
    products = [view for view in found.views.values() if _is_product(view)]
    if any(_product_weight(view).encoding in NMSE for view in products):
        return ""
    if len(products) < ALL_PRODUCTS or not any(view.flagged for view in products):
        return ""
    off = [view.residual or 0.0 for view in products]
    return arithmetic_of_errors(max(off), median(off), min(off))


def _product_weight(view: ShadowPoint) -> Any:
    """Return the weight that the point's product reads."""
    return next(call.args[1] for call in view.calls if call.op == "linear")


def _is_product(view: ShadowPoint) -> bool:
    """Return whether a point is computed by one matrix product, perhaps with a bias.

    False without a distance from the trace.
    """
    ops = [call.op for call in view.calls if call.op not in MOVES]
    one = ops.count("linear") == 1 and set(ops) <= {"linear", "add"}
    biased = all(
        getattr(arg, "ndim", 1) == 1
        for call in view.calls
        if call.op == "add"
        for arg in call.args[1:2]
    )
    return one and biased and view.residual is not None


class TraceInArithmetic(WrappedTrace):
    """A trace that is judged as if it was computed in another dtype than the recorded one."""

    def __init__(self, trace: TraceLike, dtype: str) -> None:
        """Wrap a trace; `dtype` is the arithmetic of its values."""
        super().__init__(trace)
        self.dtype = dtype

    @cached_property
    def records(self) -> Mapping[str, RecordLike]:
        """The trace's records by key, with the dtype that the trace is judged by."""
        return {key: self._with_dtype(record) for key, record in self._trace.records.items()}

    def find_record(self, key: str) -> RecordLike | None:
        """Return the record of a key, with the dtype that the trace is judged by.

        None if absent.
        """
        found = self._trace.find_record(key)
        return None if found is None else self._with_dtype(found)

    def _with_dtype(self, record: RecordLike) -> RecordLike:
        """Return a record with the dtype that the trace is judged by, not the recorded one."""
        made: RecordLike = replace(record, dtype=self.dtype)  # type: ignore[type-var]
        return made
