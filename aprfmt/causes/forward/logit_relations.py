"""Recorded logits that are the model's times a temperature, or minus one number for each row.

A sampler divides logits by its temperature, after all that the model does; a trainer may do so too
before it takes log-probabilities. Log-probabilities show the factor all the same: what a softmax
took from a row is one number.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Layers, Mismatch
from aprfmt.causes.forward.residual_stream import factor_change, temperature_text
from aprfmt.inference.replay.patched_model import PassLocation, PatchedModel
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.short_numbers import short_number

LEFT = 3  # tolerances that logits less a number for each row may be apart, as they were recorded
NEAR = 20  # tolerances within which a fitted factor explains a point
NEARLY = 0.02  # share of the difference that a factor leaves which explains nearly all of it
UNLIKE = 0.01  # how far such a factor is from 1, at least


def find_logit_relation(case: Mismatch) -> Iterator[Change]:
    """Yield the change that the recorded logits are the model's times a factor, or shifted by row.

    A shift is one number for each row, which no softmax shows. The factor is found on the even
    rows and judged on the odd ones.
    """
    if case.view.point != "logits" or case.view.recorded is None:
        return
    cap = case.patched.hp["final_softcap"]
    shape = case.view.mine.shape
    if shape != case.view.theirs.shape:
        return
    ours, theirs = (np.asarray(x, np.float64).reshape(-1, shape[-1]) for x in case.recorded_rows)
    if not np.isfinite(theirs).all():
        return
    limit = NEAR * case.view.tolerance
    mean = theirs.mean(1, keepdims=True)
    x, y = ours - ours.mean(1, keepdims=True), theirs - mean
    normalized = case.view.recorded.normalized
    # One number for each row moves no softmax. What it leaves is no more than rounding.
    left = rel_l2(x + mean, theirs)
    if not normalized and rel_l2(x, y) <= limit and left <= LEFT * case.view.tolerance:
        yield Change(
            "capture_point",
            "what is recorded as logits is the logits less a number for each row, which no softmax "
            "sees",
            (case.view.key,),
            values={"recorded_as": "logits", "is": "logits less a number for each row"},
            drop=frozenset({case.view.key}),
            scoped=False,
            gives=_with_rows(case, x + mean),
        )
        return
    if not normalized and cap is None:
        return  # a factor of them all is looked for with the other factors
    factor = _factor_of_rows(x, y, limit)
    if factor is None:
        return
    if cap is None:
        configured = float(case.patched.hp["logit_scale"])
        yield from case.rounded_change(
            lambda value: factor_change("logit_scale", value, configured), factor * configured
        )
        return
    call = case.call("softcap")
    if call is not None:
        place = call.location
        yield from case.rounded_change(lambda value: _factor_after_cap(value, place), factor)


def nearly_factor_changes(case: Mismatch) -> Iterator[Change]:
    """Yield changes of a factor of all logits that explains nearly all of their difference.

    What it leaves may be another fault's. The factor is found on the even rows and judged on the
    odd ones. Of a rounded factor and of a rounded temperature, 1/factor, each is a change.
    """
    if case.view.point != "logits" or case.view.recorded is None:
        return
    shape = case.view.mine.shape
    if case.patched.hp["final_softcap"] is not None or shape != case.view.theirs.shape:
        return
    ours, theirs = (np.asarray(x, np.float64).reshape(-1, shape[-1]) for x in case.recorded_rows)
    if not np.isfinite(theirs).all():
        return
    x, y = (each - each.mean(1, keepdims=True) for each in (ours, theirs))
    limit = NEARLY * rel_l2(x, y)
    factor = _factor_of_rows(x, y, limit) if limit else None
    if factor is None or abs(factor - 1) <= UNLIKE:
        return
    left = rel_l2(factor * x, y)
    configured = float(case.patched.hp["logit_scale"])
    every = (short_number(factor * configured, left), configured / short_number(1 / factor, left))
    for value in dict.fromkeys(every):
        yield factor_change("logit_scale", value, configured)


def _factor_of_rows(x: Array, y: Array, limit: float) -> float | None:
    """Return the factor f of y = f x, with row means removed, fitted on every second row.

    A single row is fitted on every second value. None unless the remaining rows, or values, agree
    within the relative distance `limit`.
    """
    x, y = (x.T, y.T) if len(x) == 1 else (x, y)
    even = np.arange(len(x)) % 2 == 0
    power = float(np.sum(x[even] ** 2))
    if not power:
        return None
    factor = float(np.sum(x[even] * y[even])) / power
    if factor <= 0 or rel_l2(factor * x[~even], y[~even]) > limit:
        return None
    return factor


def _with_rows(case: Mismatch, values: Array) -> Array:
    """Return the reference's value of the point, `values` replacing the rows that the trace has."""
    made = np.array(case.view.mine, np.float64)
    rows = [slice(None)] * case.view.axis + [case.rows]
    made[tuple(rows)] = values.reshape(case.recorded_rows[0].shape)
    return made


def _factor_after_cap(value: float, place: PassLocation) -> Change:
    """Return the change that multiplies the logits by `value` after their softcap.

    `place` is the location of the softcap in the pass.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose logits are multiplied by `value` after their softcap."""

        def override(op: Any, at: Any, *args: Any) -> Any:
            """Return the softcap's result, times `value` where it caps the logits."""
            y = op(*args)
            return patched.backend.scale(y, value) if at == place else y

        return patched.with_op("softcap", override, layers)

    says = f"the logits are multiplied by {value:.6g} after their cap: {temperature_text(value)}"
    return Change("multiplier", says, ("logits",), make, {"factor": value}, scoped=False)


HYPOTHESES = (
    Hypothesis(
        "multiplier",
        find_logit_relation,
        29,
        "a factor of rows that a softmax moved, before one of the values themselves",
    ),
)
