"""How far rounding alone moves a trace, measured by a reference pass in the same arithmetic.

Where a trace holds outputs of layers, or logits alone, rounding grows over many operations
before it is seen, by an amount that depends on the model's own values. So the reference pass is
run once more, rounded as that arithmetic rounds, on the trace's own inputs: how far it then is
from the reference is how far a right engine is off. Measured on tiny models of seven
architectures run by torch in 16 bits, or with products in TF32 or 16 bits: 0.5 to 1.3 times
that, at every point.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.norm_changes import NORMS, round_before_weight, round_norm_steps
from aprfmt.causes.forward.rounding import (
    cut_to_type,
    round_operations,
    round_rope_table,
    round_to_type,
)
from aprfmt.diagnosis.run_arithmetic import TraceInArithmetic
from aprfmt.inference.replay.patched_model import MOVES, OPS, PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint, run_shadow_pass
from aprfmt.measure.distances import exact_16_bit_type, rel_l2
from aprfmt.measure.tolerances import MOE_FACTOR, ROUNDOFF, operation_tolerance
from aprfmt.tensors.norms import exact_norm

Array = NDArray[Any]
SPAN = 8  # operations before a point from which rounding is measured, not looked up
TIMES = 3.0  # a right engine may be this many times further off than the rounded reference
# A few huge values make most of what some points are off by. What rounding does to them is luck:
# the four roundings before such a value, and those of the stream, may add up.
FEW_VALUES, FEW_SHARE, MOST_OF_ALL, ROUNDINGS = 4, 0.01, 0.5, 6.0
ROUNDED = 8.0  # roundings of one operation: times the unit roundoff, of the value or its row's size
LIKE = 0.3  # and this near at least, or its arithmetic is finer
ROWS = 5.0  # single rows scatter by this factor; a fault leaves some rows as they were
SAME = 0.99  # share of a point's values that are equal where rounding gives it
FEWEST = 64  # values that have to be short before they say what computed them
NEARER = 2.0**-14  # share by which cut values are smaller, at least: in float16 about 2 ** -12
CUT = 0.8  # rounding is like no mistake: no usual one takes away more of it than to this share
# Rounding has no direction: of what a run is off by, small changes of all kinds of operations
# together explain a part so small that this share is left, measured 0.83 to 1.0.
DIRECTED = 0.8
NUDGE = 1e-3
NUDGED = (
    "linear", "add", "scale", "activate", "rms_norm", "layer_norm", "scores", "probs", "softcap",
    "mix", "embed",
)  # fmt: skip
ANGLES = ("rope_theta", "rope_theta_local")
MOST = 96  # passes with one operation nudged; beyond, not in single layers
PRODUCTS = ("linear", "router")
FACTORS = (*PRODUCTS, "scores", "mix")  # whose factors TF32 rounds
WIDE = (
    "add_wide",
    "decay",
    "decay_rates",
    "scan",
    "alibi_bias",
)  # computed in float32 in every arithmetic
SCALES = ("embedding_scale", "residual_scale", "logit_scale")  # numbers that are rounded as well


@dataclass(frozen=True)
class Arithmetic:
    """One way of rounding: its dtype, its name in words, and a function that rounds a model so."""

    dtype: str
    says: str
    make: Callable[[PatchedModel, str], PatchedModel]


def _round_weights(patched: PatchedModel, dtype: str) -> PatchedModel:
    """Return the model with all weights rounded to `dtype`, the name of a float type."""
    held = patched.weights.with_change(lambda x: round_to_type(x, dtype))
    return replace(patched, weights=held, original=patched.stored)


def _round_results(patched: PatchedModel, dtype: str) -> PatchedModel:
    """Return the model with weights, rope tables and all computed results rounded to `dtype`."""

    def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an operation's result rounded to `dtype`; of a tuple only the first item is."""
        y = op(*args, **kwargs)
        if isinstance(y, tuple):  # a delta net's state is not rounded
            return round_to_type(y[0], dtype).astype(y[0].dtype), *y[1:]
        return round_to_type(y, dtype).astype(y.dtype)

    patched = round_rope_table(dtype)(_round_weights(patched, dtype), None)
    factors = {name: float(patched.hp[name]) for name in SCALES}
    short = {name: float(round_to_type(value, dtype)) for name, value in factors.items()}
    patched = patched if short == factors else patched.with_hyper(**short)
    for op in OPS:
        if op not in (*MOVES, *WIDE):
            patched = patched.with_op(op, override, None)
    return patched


def _round_factors(patched: PatchedModel, dtype: str) -> PatchedModel:
    """Return the model with weights and both factors of every product rounded to `dtype`."""

    def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an operation's result on arrays rounded to `dtype`, those with 2 axes or more."""
        short = [
            round_to_type(x, dtype).astype(x.dtype)
            if isinstance(x, np.ndarray) and x.ndim > 1
            else x
            for x in args
        ]
        return op(*short, **kwargs)

    patched = _round_weights(patched, dtype)
    for op in FACTORS:
        patched = patched.with_op(op, override, None)
    return patched


def _round_sums(patched: PatchedModel, dtype: str) -> PatchedModel:
    """Return the model with results rounded to `dtype`, and noise in each product.

    The noise stands for the rounding of its running sum. A running sum of n terms is rounded n
    times while it grows: by 0.4 u of its size each time (u: the unit roundoff), together by 0.4 u
    times the root of n / 2 of the result.
    """
    draws = np.random.default_rng(1)

    def override(op: Any, at: Any, x: Any, w: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return a product plus normal noise of the size that rounding its running sum makes."""
        y = op(x, w, *rest, **kwargs)
        size = np.sqrt(np.mean(np.square(y), axis=-1, keepdims=True))
        off = 0.4 * ROUNDOFF[dtype] * (w.n_columns / 2) ** 0.5
        return (y + off * size * draws.standard_normal(y.shape)).astype(y.dtype)

    patched = _round_results(patched, dtype)
    for op in PRODUCTS:
        patched = patched.with_op(op, override, None)
    return patched


# From the finest to the coarsest. `_round_results` is what a dtype means where it is known.
LEVELS: tuple[Arithmetic, ...] = (
    Arithmetic("tf32", "the factors of its products in TF32", _round_factors),
    Arithmetic("float16", "all of its operations in float16", _round_results),
    Arithmetic("bfloat16", "all of its operations in bfloat16", _round_results),
    Arithmetic("bfloat16", "its sums in bfloat16 too", _round_sums),
)


def needs_measured_rounding(view: ShadowPoint) -> bool:
    """Return whether so many operations precede a point (over SPAN) that rounding is measured.

    After fewer operations the tolerance of one operation is used.
    """
    return view.residual is not None and sum(op.op not in MOVES for op in view.calls) > SPAN


def with_recorded_arithmetic(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass
) -> RecordedTrace:
    """Return the trace with tolerances measured by a reference pass rounded as the trace is.

    Only for points after many operations, and only if the trace is 16-bit or TF32: by its dtype,
    or because a 16-bit type holds its values exactly. Else the trace is returned unchanged.
    """
    long = [view for view in found.views.values() if needs_measured_rounding(view)]
    if not long:
        return recorded
    dtypes = {view.recorded.dtype for view in long if view.recorded is not None}
    dtype = next((name for name in ("bfloat16", "float16", "tf32") if name in dtypes), "")
    if not dtype:
        dtype = next((held for view in long if (held := _exact_16_bit_type(view))), "")
        recorded = (
            recorded.with_trace(TraceInArithmetic(recorded.trace, dtype)) if dtype else recorded
        )
    if not dtype:
        return recorded
    level = next(level for level in LEVELS if level.dtype == dtype)
    return recorded.with_bounds(
        _long_point_bounds(long, _rounded_pass(patched, recorded, level), found, dtype)
    )


def _exact_16_bit_type(view: ShadowPoint) -> str:
    """Return the 16-bit type that holds all values of a point exactly; "" for none or too few.

    Zeros do not count: every type holds them, so that they show none.
    """
    assert view.recorded is not None
    values = np.asarray(view.recorded.values)
    values = values[values != 0]
    return "" if values.size < FEWEST else exact_16_bit_type(values)


def with_16_bit_points(recorded: RecordedTrace, found: ShadowPass) -> RecordedTrace:
    """Return the trace with a 16-bit type's tolerance at the points that were computed in it.

    Such a point disagrees, its values are all exact in that type though the trace has another
    dtype, and no value is further off than a few roundings: only some operations of the run, a
    norm or the head, are in 16 bits.
    """
    bounds = dict(recorded.bounds)
    for view in found.flagged:
        if view.recorded is None or needs_measured_rounding(view):
            continue
        dtype = _exact_16_bit_type(view)
        if not dtype or dtype == view.recorded.dtype:
            continue
        mine, theirs = view.recorded.comparable_values(view.mine, view.axis)
        size = np.sqrt(np.mean(np.square(mine, dtype=np.float64), axis=-1, keepdims=True))
        most = ROUNDED * ROUNDOFF[dtype] * np.maximum(np.abs(mine), size)
        if (np.abs(np.float64(theirs) - mine) <= most).all():
            bounds[view.key] = operation_tolerance(dtype, dtype).rel_l2
    return recorded if bounds == recorded.bounds else recorded.with_bounds(bounds)


def points_in_16_bits(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass
) -> Mapping[str, str]:
    """Return {point key: dtype} of the points that a finer run computed in a 16-bit type.

    They are in pass order. The recorded values are the reference's rounded to that type, or what
    the operation gives for inputs and weights rounded to it.
    """
    short = {
        key: (view, dtype)
        for key, view in found.views.items()
        if key in recorded.bounds and view.calls and not needs_measured_rounding(view)
        if (dtype := _exact_16_bit_type(view)) not in ("", _dtype_of(view))
    }
    named = {key: dtype for key, (view, dtype) in short.items() if _is_rounded(view, view, dtype)}
    for dtype in sorted({dtype for key, (_, dtype) in short.items() if key not in named}):
        ops = {view.calls[-1].op for view, held in short.values() if held == dtype} - {*MOVES}
        ways = (round_before_weight(dtype), round_norm_steps(dtype), lambda same, layers: same)
        for inside in ways[0 if ops & {*NORMS} else -1 :]:
            made = _with_short_operands(inside(_round_weights(patched, dtype), None), ops, dtype)
            tried = run_shadow_pass(made, recorded).views
            named |= {
                key: dtype
                for key, (view, held) in short.items()
                if held == dtype and key in tried and _is_rounded(tried[key], view, dtype)
            }
    return {key: named[key] for key in short if key in named}


def points_cut_to_16_bits(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass
) -> Mapping[str, str]:
    """Return {point key: its type, in words} of the points cut to a 16-bit type, in pass order.

    The recorded values are the reference's cut to it, toward zero, and not rounded to nearest. At
    points after many operations products or sums are cut in the whole pass. Those that are not
    nearer to zero than the reference's are no such points.
    """
    short = {
        key: (view, dtype)
        for key, view in found.views.items()
        if view.calls and view.residual and _is_nearer_to_zero(view)
        if (dtype := _exact_16_bit_type(view))
    }
    named = {
        key
        for key, (view, dtype) in short.items()
        if _is_rounded(view, view, dtype, cut_to_type) and not _is_rounded(view, view, dtype)
    }
    long = {key for key, (view, _) in short.items() if needs_measured_rounding(view)}
    for op in ("linear", "add") if long and not named else ():
        for dtype in sorted({short[key][1] for key in long}):
            cut = round_operations((op,), dtype, cut_to_type)(patched, None)
            tried = run_shadow_pass(cut, recorded).views
            own = [key for key in long if short[key][1] == dtype and key in tried]
            named |= {key for key in own if _is_rounded(tried[key], short[key][0], dtype)}
    return {key: f"{short[key][1]}, cut and not rounded" for key in short if key in named}


def _is_nearer_to_zero(view: ShadowPoint) -> bool:
    """Return whether a point's recorded values are smaller than the reference's, as by cutting."""
    assert view.recorded is not None
    mine, theirs = (np.float64(x) for x in view.recorded.comparable_values(view.mine, view.axis))
    power = float(np.sum(mine * mine))
    return mine.shape == theirs.shape and float(np.sum(mine * theirs)) < power * (1 - NEARER)


def _dtype_of(view: ShadowPoint) -> str:
    """Return the dtype of a point in the trace; "" where the trace has no such point."""
    return "" if view.recorded is None else view.recorded.dtype


def _is_rounded(
    made: ShadowPoint,
    view: ShadowPoint,
    dtype: str,
    rounds: Callable[[Array, str], Array] = round_to_type,
) -> bool:
    """Return whether the values of `made`, rounded to `dtype`, are those recorded at `view`.

    A few may differ by one rounding, since a sum in another order rounds them the other way.
    `rounds(values, dtype)` rounds them: to nearest, or by `cut_to_type` toward zero.
    """
    assert view.recorded is not None
    mine, theirs = view.recorded.comparable_values(made.mine, view.axis)
    if mine.shape != theirs.shape:
        return False
    return bool(np.mean(rounds(mine, dtype) == theirs) >= SAME)


def _with_short_operands(patched: PatchedModel, ops: set[str], dtype: str) -> PatchedModel:
    """Return the model whose operations `ops` have inputs and results rounded to `dtype`."""

    def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of an operation on operands rounded to `dtype`, itself rounded so.

        A result that is a tuple is not rounded.
        """
        short = [
            round_to_type(x, dtype).astype(x.dtype)
            if isinstance(x, np.ndarray) and x.dtype.kind == "f"
            else x
            for x in args
        ]
        y = op(*short, **kwargs)
        return y if isinstance(y, tuple) else round_to_type(y, dtype).astype(y.dtype)

    return patched.with_ops(ops, override, None)


def explain_by_arithmetic(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass, nearest: float
) -> tuple[RecordedTrace, str] | None:
    """Return (trace, sentence) for the first arithmetic whose rounding explains all differences.

    None if no arithmetic does. The trace returned has that arithmetic's measured tolerances.
    `nearest` is the fraction of the difference that the best usual mistake leaves: below CUT the
    result is None, since a mistake explains more. Every flagged point must be about as far off as
    the arithmetic makes it, in every row, and not in a direction that a slightly wrong operation
    would move it.
    """
    flagged = found.flagged
    if nearest < CUT or not any(needs_measured_rounding(view) for view in flagged):
        return None
    coarsest = {view.recorded.dtype for view in flagged if view.recorded is not None}
    least = max((i for i, level in enumerate(LEVELS[:3]) if level.dtype in coarsest), default=-1)
    for level in LEVELS[least + 1 :]:
        rounded_pass = _rounded_pass(patched, recorded, level)
        if all(_fits_arithmetic(view, rounded_pass, level) for view in flagged):
            long = [view for view in found.views.values() if needs_measured_rounding(view)]
            if next(_directed_points(patched, recorded, long, rounded_pass), None) is not None:
                return None
            read = recorded.with_trace(TraceInArithmetic(recorded.trace, level.dtype))
            return read.with_bounds(
                _long_point_bounds(long, rounded_pass, found, level.dtype)
            ), level.says
    return None


def first_directed_point(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass
) -> ShadowPoint | None:
    """Return the first point whose difference has a direction, so is no rounding; None if none.

    A wrong number moves values as a slightly larger result of some operation does, or a slightly
    different base of rope; rounding does not. Only points after many operations of traces in
    16-bit or TF32 arithmetic are judged. The difference may be inside the tolerance.
    """
    long = [
        view for view in found.views.values() if needs_measured_rounding(view) and view.residual
    ]
    long = [view for view in long if not _is_concentrated(view)]  # luck has any direction
    dtypes = {view.recorded.dtype for view in long if view.recorded is not None}
    level = next((level for level in LEVELS if level.dtype in dtypes), None)
    if level is None:
        return None
    rounded_pass = _rounded_pass(patched, recorded, level)
    return next(_directed_points(patched, recorded, long, rounded_pass), None)


def _directed_points(
    patched: PatchedModel,
    recorded: RecordedTrace,
    long: list[ShadowPoint],
    rounded_pass: ShadowPass,
) -> Iterator[ShadowPoint]:
    """Yield those of the points `long` whose difference slightly larger results would explain.

    The difference is fitted by the changes that operations 0.1 % larger make at the point. The
    point is yielded where the fit leaves less than the fraction DIRECTED of it, both from the
    exact reference and from `rounded_pass`, the pass of the rounded reference.
    """
    moved = [run_shadow_pass(made, recorded.with_bounds({})) for made in _nudged_models(patched)]
    for view in long:
        assert view.recorded is not None
        mine, theirs = (
            np.float64(x) for x in view.recorded.comparable_values(view.mine, view.axis)
        )
        others = [made.views[view.key].mine for made in moved if view.key in made.views]
        columns = [
            (view.recorded.comparable_values(x, view.axis)[0] - mine).reshape(-1) for x in others
        ]
        columns = [column / exact_norm(column) for column in columns if column.any()]
        if not columns or view.key not in rounded_pass.views:
            continue
        rounded = view.recorded.comparable_values(rounded_pass.views[view.key].mine, view.axis)[0]
        left = [_unexplained_share(columns, (theirs - x).reshape(-1)) for x in (mine, rounded)]
        if max(left) < DIRECTED:
            yield view


def _unexplained_share(columns: list[Array], difference: Array) -> float:
    """Return the fraction of a difference that no linear sum of the columns makes, 0 to 1.

    1 where the difference is zero or not finite.
    """
    whole = exact_norm(difference)
    if not 0 < whole < np.inf:
        return 1.0
    basis = np.stack(columns, 1)
    if not np.isfinite(basis).all():
        return 1.0
    fit, *_ = np.linalg.lstsq(basis, difference, rcond=1e-6)
    return exact_norm(difference - basis @ fit) / whole


def _nudged_models(patched: PatchedModel) -> Iterator[PatchedModel]:
    """Yield patched models in which one kind of operation, or a rope base, gives 0.1 % more."""

    def larger(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an operation's result times 1 + NUDGE, to see how far a small error is carried."""
        y = op(*args, **kwargs)
        return (y * (1 + NUDGE)).astype(y.dtype)

    single = [frozenset({layer}) for layer in range(patched.n_layers)]
    scopes: list[frozenset[int] | None] = [None, *single]
    if len(NUDGED) * len(scopes) > MOST:
        scopes = [None]
    for layers in scopes:
        for op in NUDGED:
            yield patched.with_op(op, larger, layers)
    for name in ANGLES:
        if name in patched.hp and patched.hp[name] is not None:
            yield patched.with_hyper(**{name: float(patched.hp[name]) * (1 + NUDGE)})


def _rounded_pass(patched: PatchedModel, recorded: RecordedTrace, level: Arithmetic) -> ShadowPass:
    """Return the shadow pass of the reference model rounded in this arithmetic."""
    return run_shadow_pass(level.make(patched, level.dtype), recorded.with_bounds({}))


def _fits_arithmetic(view: ShadowPoint, rounded_pass: ShadowPass, level: Arithmetic) -> bool:
    """Return whether a point is about as far off as an arithmetic makes it, overall and per row.

    `rounded_pass` is the reference's pass in that arithmetic. A point after few operations only
    has to be within the tolerance of one operation.
    """
    if not needs_measured_rounding(view):
        return (view.residual or 0.0) <= operation_tolerance(level.dtype, level.dtype).rel_l2
    off = _rounding_distance(view, rounded_pass)
    if not 0 < off < np.inf or view.residual is None:
        return False
    rows = np.array(list(_row_ratios(view, rounded_pass)))
    whole = LIKE <= view.residual / off <= TIMES
    return whole and bool(rows.min() >= LIKE / ROWS * 2 and rows.max() <= ROWS)


def _rounding_distance(view: ShadowPoint, rounded_pass: ShadowPass) -> float:
    """Return the relative L2 of the rounded reference from the exact one at a point.

    Only the rows of the trace count. 0.0 where the rounded pass or the trace has no such point.
    """
    other = rounded_pass.views.get(view.key)
    if other is None or view.recorded is None:
        return 0.0
    return rel_l2(
        *(view.recorded.comparable_values(x, view.axis)[0] for x in (other.mine, view.mine))
    )


def _row_ratios(view: ShadowPoint, rounded_pass: ShadowPass) -> Iterator[float]:
    """Yield, row by row, how far the trace is off over how far the rounded reference is off.

    Both are L2 distances from the exact reference.
    """
    assert view.recorded is not None
    mine, theirs = view.recorded.comparable_values(view.mine, view.axis)
    rounded, _ = view.recorded.comparable_values(rounded_pass.views[view.key].mine, view.axis)
    for a, b, c in zip(
        *(np.moveaxis(x, view.axis, 0) for x in (mine, theirs, rounded)), strict=True
    ):
        yield float(exact_norm(b - a) / max(exact_norm(c - a), 1e-30))


def _long_point_bounds(
    long: list[ShadowPoint], rounded_pass: ShadowPass, found: ShadowPass, dtype: str
) -> Mapping[str, float]:
    """Return {point key: tolerance, relative L2} of the points `long`, by the rounded pass.

    Points at which the rounded reference equals the exact one, or is infinitely far from it, are
    left out.
    """
    factor = TIMES * (MOE_FACTOR if _experts_may_flip(found, rounded_pass) else 1.0)
    luck = ROUNDINGS / TIMES * ROUNDOFF[dtype]
    offs = {
        view.key: max(luck * _is_concentrated(view), _rounding_distance(view, rounded_pass))
        for view in long
    }
    return {key: factor * off for key, off in offs.items() if 0 < off < np.inf}


def _is_concentrated(view: ShadowPoint) -> bool:
    """Return whether a few values make up most of a point's squared difference."""
    assert view.recorded is not None
    mine, theirs = (np.float64(x) for x in view.recorded.comparable_values(view.mine, view.axis))
    squares = np.sort(np.square(theirs - mine).reshape(-1))
    few = squares[-max(FEW_VALUES, int(FEW_SHARE * squares.size)) :]
    return bool(few.sum() > MOST_OF_ALL * squares.sum())


def _experts_may_flip(found: ShadowPass, rounded_pass: ShadowPass) -> bool:
    """Return whether rounding may make the router choose other experts for some token.

    It may where TIMES the rounding of the router's logits reaches the margin between experts.
    """
    for key, view in found.views.items():
        if view.point != "router_margin" or key not in rounded_pass.views:
            continue
        logits = key.replace("router_margin", "router")
        pair = [made.views[logits].mine for made in (found, rounded_pass) if logits in made.views]
        moved = float(np.abs(pair[0] - pair[1]).max()) if len(pair) == 2 else np.inf
        if float(np.min(view.mine)) <= TIMES * moved:
            return True
    return False
