"""Hypotheses about an adapter that an engine serves: with which scale, and in which weights."""

from collections.abc import Iterator, Mapping

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encoding_names import ALIASES
from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch
from aprfmt.causes.forward.product import Product, product_of, replace_weights
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.served_adapter import ServedAdapter
from aprfmt.measure.distances import exact_16_bit_type
from aprfmt.measure.encoding_noise import float_spacing

CAUSE_ROWS = (
    Cause(
        "served_adapter", "forward", "bug",
        "An engine serves an adapter with another scale than the adapter states, without it, in "
        "some of its weights alone, or adds it twice.",
        "Products with the adapter's weights differ, and all others agree on their own inputs.",
        "The pass with the adapter's change multiplied by that number is the run's.",
    ),
)  # fmt: skip

NUMBERS = (0.0625, 0.125, 0.25, 0.5, 1.5, 2.0, 4.0, 8.0, 16.0)  # multiples to begin a search at
TURNED = 4  # values of one row of a weight that may be at the next number
STATED = 1e-3  # relative: how near to 1 a solved multiple is the stated change


def try_adapter_scales(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the scale of the pass's adapter; none for a pass without an adapter."""
    adapter = case.patched.adapter
    if adapter is None or not _reads_weight_of(case, adapter):
        return
    yield from _rounded_merge(case, adapter)
    for says, numbers in adapter.mistakes:
        shown = sorted({round(number, 6) for number in numbers.values()})
        many = f"{shown[0]:g} times" if len(shown) == 1 else "other numbers of times"
        yield _adapter_change(adapter, f"its change is added {many}: {says}", numbers)
    whole = dict.fromkeys(adapter.keys, 0.0)
    yield _adapter_change(adapter, "it is not applied: the weights are those of the base", whole)
    yield _adapter_change(adapter, "its change is added twice", dict.fromkeys(adapter.keys, 2.0))
    yield from _left_out_parts(case, adapter)
    yield from _solved_scale(case, adapter)


def _rounded_merge(case: Mismatch, adapter: ServedAdapter) -> Iterator[Change]:
    """Yield the change that rounds merged weights to the types of the base's.

    A sum of the base and the adapter's change that is made in another order may end at the next
    number of the type: where that is said already, single values of the point's own weight do.
    """
    rounded = adapter.rounded()
    if not rounded:
        return
    says = "the weights that the adapter is merged into are rounded to the types of the base's"
    found = product_of(case)
    if found is None or found.key not in rounded or found.key not in case.patched.replaced:
        yield Change("rounding", says, tuple(rounded), replace_weights(rounded), scoped=False)
        return
    turned = _turned_values(case, found, rounded[found.key])
    if turned is not None:
        says += f", and single values of {found.key} to the next number"
        yield Change("rounding", says, (found.key,), replace_weights(turned), scoped=False)


def _turned_values(case: Mismatch, found: Product, own: Array) -> Mapping[str, Array] | None:
    """Return {key: values} of a product's weight with single values at the next BF16 or F16 number.

    `own` are its rounded values. Each output column that differs must differ by a few inputs times
    the step of the weight's values there; None if one does not.
    """
    weight = case.patched.weights[found.key]
    w = np.array(own, np.float64).reshape(weight.n_rows, weight.n_columns)
    kind = exact_16_bit_type(w)
    if not kind:
        return None
    x = found.x.astype(np.float64)
    away = found.theirs.astype(np.float64) - found.ours
    bound = case.view.tolerance * float(np.linalg.norm(found.theirs)) / len(w) ** 0.5
    lengths = np.maximum(np.sum(x * x, axis=0), 1e-300)
    for row in np.flatnonzero(np.linalg.norm(away, axis=0) > bound):
        left = away[:, row]
        for _ in range(TURNED):
            if np.linalg.norm(left) <= bound:
                break
            fits = x.T @ left / lengths
            at = int(np.argmax(fits * fits * lengths))
            step = float(float_spacing(w[row, at : at + 1], ALIASES[kind])[0])
            times = round(float(fits[at]) / step)
            if abs(times) != 1:
                return None
            w[row, at] += times * step
            left = left - times * step * x[:, at]
        else:
            return None
    return {found.key: w.astype(np.float32).reshape(own.shape)}


def _adapter_change(
    adapter: ServedAdapter, says: str, numbers: Mapping[str, float], multiple: float | None = None
) -> Change:
    """Return the change that multiplies the adapter's changes by `numbers`, {role key: number}.

    `says` ends the sentence on the adapter; `multiple` is a solved number to report.
    """
    values = {"adapter_times": multiple} if multiple is not None else {}
    return Change(
        "served_adapter",
        f"the adapter is served otherwise than it states: {says}",
        tuple(numbers),
        lambda patched, layers: replace_weights(adapter.merged(numbers))(patched, layers),
        values,
        scoped=False,
    )


def _reads_weight_of(case: Mismatch, adapter: ServedAdapter) -> bool:
    """Return whether an operation before the differing point reads a weight of the adapter."""
    keys = {
        getattr(call.args[1], "key", "").partition("[")[0]
        for call in case.calls("linear", "router", "embed")
        if len(call.args) > 1
    } | {getattr(call.args[0], "key", "") for call in case.calls("embed")}
    return not keys.isdisjoint(adapter.keys)


def _left_out_parts(case: Mismatch, adapter: ServedAdapter) -> Iterator[Change]:
    """Yield changes that leave the adapter out of the weights of one role, or of one layer."""
    roles = list(dict.fromkeys(split_key(key)[1] for key in adapter.keys))
    for role in roles if len(roles) > 1 else ():
        numbers = {key: 0.0 for key in adapter.keys if split_key(key)[1] == role}
        yield _adapter_change(adapter, f"it is not applied to {role}", numbers)
    for layer in [case.layer] if case.layer >= 0 else range(case.patched.n_layers):
        here = {key: 0.0 for key in adapter.keys if split_key(key)[0] == layer}
        if 0 < len(here) < len(adapter.keys):
            yield _adapter_change(adapter, f"it is not applied in layer {layer}", here)


def _solved_scale(case: Mismatch, adapter: ServedAdapter) -> Iterator[Change]:
    """Yield the change with the number that the trace shows the adapter's change multiplied by.

    Where the point is a product itself, the number is fitted to every second row of it.
    """

    def make(number: float) -> Change:
        """Return the change that multiplies the whole adapter's change by `number`."""
        says = f"its change is added {number:g} times, which none of its numbers gives"
        return _adapter_change(adapter, says, dict.fromkeys(adapter.keys, number), number)

    found = product_of(case)
    if found is None or found.key not in adapter.keys:
        yield from case.best_number(make, NUMBERS)
        return
    weight = case.patched.weights[found.key]
    base = np.asarray(adapter.merged({found.key: 0.0})[found.key], np.float64)
    whole = np.asarray(adapter.merged({found.key: 1.0})[found.key], np.float64)
    delta = found.x[::2] @ (whole - base).reshape(weight.n_rows, weight.n_columns).T
    away = (found.theirs.astype(np.float64) - found.ours)[::2]
    size = float(np.sum(delta * delta))
    number = 1 + float(np.sum(away * delta)) / size if size else 1.0
    if abs(number - 1) > STATED:
        yield from case.rounded_change(make, number)


HYPOTHESES = (
    Hypothesis(
        "served_adapter", try_adapter_scales, 38, "one number of an adapter, before single weights"
    ),
)
