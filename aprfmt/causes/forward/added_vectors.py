"""Hypotheses about a constant that a pass adds: one vector in every row, or one number in all."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.linear import (
    dropped_bias_change,
    find_missing_bias,
    repeated_bias_change,
)
from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch, Patch
from aprfmt.causes.forward.product import replace_weights
from aprfmt.inference.points import POINTS
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.short_numbers import short_number
from aprfmt.measure.tolerances import DISCRETE
from aprfmt.tensors.norms import exact_norm

FEWEST = 4  # rows: two give the vector, two judge it
ROWS = ("tokens", "logits")  # kinds of rows that are of one token each
CLEAR = 10.0  # tolerances that the vector is larger than, and that rows differ by
EVEN = 1e-2  # share of a vector's size up to which it is one number
TIMES = (2, 4, 8)  # how often a bias is added


def find_added_vector(case: Mismatch) -> Iterator[Change]:
    """Yield the change that the same vector is added in every row of the point.

    The vector is the mean of the even rows, and the odd rows judge it. It is named where it is a
    stored bias of the layer that was left out or repeated, or another layer's in its place.
    """
    vector = _added_vector(case)
    if vector is None or _is_of_a_product(case):
        return
    named = list(_stored_biases(case, vector))
    yield from named
    if named:
        return
    point, layer, key = case.view.point, case.view.layer, case.view.key
    mean = float(vector.mean())
    if exact_norm(vector - mean) <= EVEN * exact_norm(vector):
        if point == "logits":
            return  # one number for a row: no softmax sees it
        value = short_number(mean, EVEN)
        says = f"{value:g} is added to every value of {point}, which the model does not do"
        values = {"point": point, "added": value}
        yield Change("missing_bias", says, (point,), _add(point, np.float32(value)), values)
        return
    says = f"a bias is added that the model does not have: the same vector in every row of {key}"
    layers = frozenset({layer}) if layer >= 0 else None
    add = _add(point, vector.astype(np.float32))
    yield Change(
        "missing_bias",
        says,
        (key,),
        lambda patched, _: add(patched, layers),
        {"point": point},
        scoped=False,
    )


def _added_vector(case: Mismatch) -> Array | None:
    """Return what every row of the point has beyond the reference's [columns], float64.

    None where rows differ by other vectors, are too few, or are too alike to show it.
    """
    view = case.view
    if view.point in DISCRETE or POINTS[view.point].rows not in ROWS or view.axis != 0:
        return None
    mine, theirs = (np.asarray(x, np.float64).reshape(len(x), -1) for x in case.recorded_rows)
    if len(mine) < FEWEST or not np.isfinite(theirs).all():
        return None
    vector = (theirs - mine)[::2].mean(0)
    least = CLEAR * view.tolerance
    if exact_norm(vector) <= least * exact_norm(theirs) / len(theirs) ** 0.5:
        return None
    if exact_norm(mine - mine.mean(0)) <= least * exact_norm(mine):
        return None  # rows that are alike differ by one vector whatever is wrong
    found: Array = vector
    return found if rel_l2((mine + vector)[1::2], theirs[1::2]) <= view.tolerance else None


def _is_of_a_product(case: Mismatch) -> bool:
    """Return whether a bias of the product that gives the point explains its difference."""
    tried = (change for change in find_missing_bias(case) if not change.general)
    return any(case.trial(change) <= case.view.tolerance for change in tried)


def _stored_biases(case: Mismatch, vector: Array) -> Iterator[Change]:
    """Yield changes of the layer's own biases that add the vector: left out, repeated, another's.

    Only biases that operations before the point read.
    """
    stored, near = case.patched.stored, max(1e-3, CLEAR * case.view.tolerance)
    layer = case.view.layer if case.view.layer >= 0 else None
    for key in (key for key in stored if key.endswith(".bias") and split_key(key)[0] == layer):
        own = np.asarray(stored[key].numpy(), np.float64).reshape(-1)
        if own.shape != vector.shape or not own.any():
            continue
        if rel_l2(-own, vector) <= near:
            yield dropped_bias_change(case.patched, key)
        for times in TIMES:
            if rel_l2((times - 1) * own, vector) <= near:
                yield repeated_bias_change(case.patched, key, times)
        for other in (k for k in stored if split_key(k)[1] == split_key(key)[1] and k != key):
            values = np.asarray(stored[other].numpy(), np.float32)
            if values.size == own.size and rel_l2(values.reshape(-1) - own, vector) <= near:
                yield Change(
                    "swapped_tensors",
                    f"{other} is added in place of {key}",
                    (key,),
                    replace_weights({key: values.reshape(stored[key].shape)}),
                    {"added": other},
                    scoped=False,
                )


def _add(point: str, added: Any) -> Patch:
    """Return a patch that adds a number, or a vector in every row, at a capture point."""

    def tap(patched: Any, layer: int, x: Any, held: Any) -> Any:
        """Return the point's value `x` with the constant added in every row."""
        rows = np.reshape(x, (len(x), -1)) + added
        return np.asarray(rows, x.dtype).reshape(x.shape)

    return lambda patched, layers: patched.with_tap(point, tap, layers)


HYPOTHESES = (
    Hypothesis("missing_bias", find_added_vector, 41, "a vector of no product, after a product's"),
)
