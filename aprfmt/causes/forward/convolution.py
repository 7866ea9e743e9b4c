"""Hypotheses about short convolutions: their taps, their gates, the rows before a token."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Mismatch,
    Patch,
    differing_rows,
)
from aprfmt.causes.forward.product import scale_weights_change, zero_weights_change
from aprfmt.causes.forward.state_restarts import restart_convolution
from aprfmt.causes.row import Cause
from aprfmt.inference.point_placement import mixer_of_layer
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel
from aprfmt.measure.distances import rel_l2

CAUSE_ROWS = (
    Cause(
        "convolution", "forward", "bug",
        "A short convolution has its taps at other positions or in another order, or a gate next "
        "to it is left out or is another part of the product before it.",
        "What the layer mixes differs in every token, and its input product is equal.",
        "Convolving with the named taps, or without the named gate, is equal.",
    ),
    Cause(
        "conv_state", "forward", "bug",
        "A short convolution looks back on other rows than those of the tokens before: the state "
        "was not reset between sequences, or not carried from step to step.",
        "The first tokens of a sequence or of a step differ, or all that look back on others.",
        "Convolving after the named rows is equal.",
    ),
)  # fmt: skip

WHERE = ("shortconv",)


def _shift_rows(window: Array, by: int) -> Array:
    """Return the window [tokens, channels] with its rows moved `by` rows later, zeros before.

    A negative `by` moves them earlier.
    """
    moved = np.zeros_like(window)
    if by > 0:
        moved[by:] = window[:-by]
    else:
        moved[:by] = window[-by:]
    return moved


def _newest_first(kernel: Array) -> Array:
    """Return kernels [channels, taps] whose taps before the last, the token's own, are reversed."""
    return np.concatenate([kernel[:, -2::-1], kernel[:, -1:]], 1)


def _last_tap_only(kernel: Array) -> Array:
    """Return kernels [channels, taps] with all taps zero but the last, the token's own."""
    alone = np.zeros_like(kernel)
    alone[:, -1] = kernel[:, -1]
    return alone


# What is said -> cause, and window and kernel as the engine took them.
TAKEN: Mapping[str, tuple[str, Callable[[Array, Array], tuple[Array, Array]]]] = {
    "the kernels are reversed: the first tap is the token's own": (
        "convolution", lambda window, kernel: (window, kernel[:, ::-1].copy()),
    ),
    "the taps are one position early: none is the token's own": (
        "convolution", lambda window, kernel: (_shift_rows(window, 1), kernel),
    ),
    "the taps are one position late: the last one is the next token's": (
        "convolution", lambda window, kernel: (_shift_rows(window, -1), kernel),
    ),
    "the state is read newest first: the taps of earlier tokens are reversed": (
        "conv_state", lambda window, kernel: (window, _newest_first(kernel)),
    ),
    "no state is carried: every token sees itself only": (
        "conv_state", lambda window, kernel: (window, _last_tap_only(kernel)),
    ),
}  # fmt: skip
# Point after which a gate multiplies -> what is said of it.
GATES: Mapping[str, str] = {
    "conv_in": "the gate before the convolution is left out",
    "conv": "the gate after the convolution is left out",
}
# Third of the product before a convolution that multiplies last -> what is said of it.
LAST_GATES: Mapping[int, str] = {
    0: "the gates before and after the convolution are exchanged",
    2: "what should be convolved gates after the convolution, and that gate is convolved",
}
# What is said of the rows before the first token -> these rows, of a window's own ones and a count.
OWN_ROWS: Mapping[str, Callable[[Array, int], Array]] = {
    "the convolution wraps around: it begins with the last rows of the sequence": (
        lambda rows, back: rows[-back:]
    ),
    "the convolution begins with the first row repeated, not with zeros": (
        lambda rows, back: np.repeat(rows[:1], back, axis=0)
    ),
    "the convolution begins with the rows after the first one mirrored, not with zeros": (
        lambda rows, back: rows[back:0:-1]
    ),
}
BIASES = (".ssm_conv1d.bias", ".shortconv.conv.bias")


def mixer_kinds(patched: PatchedModel) -> set[str]:
    """Return the kinds of token mixers other than attention that a model's layers have."""
    block, hp = patched.spec.block, patched.hp
    return {mixer_of_layer(block, hp, layer) for layer in range(patched.n_layers)} - {"none"}


def usual_convolution_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of short convolutions; none for models without them."""
    kinds = mixer_kinds(patched)
    short = "short_conv" in kinds
    if not kinds:
        return
    where = _kernel_names(patched)
    for says, (cause, taken) in TAKEN.items():
        yield Change(cause, says, where, _patch_kernel(taken), {"convolution": says})
    biases = [key for key in patched.weights if key.endswith(BIASES)]
    if biases:
        says = "the bias of the convolution is"
        yield zero_weights_change("missing_bias", f"{says} not added", biases, patched)
        yield scale_weights_change("repeated_bias", f"{says} added twice", biases, patched, 2.0)
    if not short:
        return
    for point, says in GATES.items():
        yield Change("convolution", says, WHERE, _without_gate(point), {"gate": point})
    for part, says in LAST_GATES.items():
        yield Change("convolution", says, WHERE, _gate_last_with(part), {"gate": part})


def try_convolution_mistakes(case: Mismatch) -> Iterator[Change]:
    """Yield changes with other taps, without gates, or with other rows before the first token.

    Nothing for a layer that has no mixer with a convolution.
    """
    if (
        case.layer < 0
        or mixer_of_layer(case.patched.spec.block, case.patched.hp, case.layer) == "none"
    ):
        return
    yield from usual_convolution_mistakes(case.patched)
    where = _kernel_names(case.patched)
    for first in starts_to_try(case):
        says = f"no state is carried to token {first}: the convolution begins with zeros there"
        yield Change("conv_state", says, where, restart_convolution([first]), {"restarted": first})
    back = _looks_back_wrongly(case)
    if case.call("convolve") is not None and int(case.rows[0]) == 0:
        for says, rows in OWN_ROWS.items():
            yield Change("conv_state", says, where, _begin_with_own_rows(rows), {"begins": says})
    before = _solve_rows_before(case)
    if before is not None:
        says = "the state is not reset: the convolution begins with rows of another sequence"
        yield Change("conv_state", says, where, _begin_with_rows(before), general=True)
    elif back:
        before = _solve_rows_behind_products(case, back)
        if before is not None:
            says = (
                "the state is not reset: the convolution begins with other rows than zeros, as "
                f"those of another sequence; only the first {back} tokens look back on them"
            )
            here, begin = frozenset({case.layer}), _begin_with_rows(before)
            yield Change(
                "conv_state",
                says,
                where,
                lambda patched, _: begin(patched, here),
                scoped=False,
                general=True,
                most="located",
            )


def starts_to_try(case: Mismatch) -> list[int]:
    """Return the numbers of tokens at which a state may have been reset.

    They are the first recorded token and the first wrong one, but never token 0, which starts
    without a state.
    """
    late = differing_rows(case)
    return [int(at[0]) for at in (case.rows, late) if len(at) and at[0] > 0]


def _kernel_names(patched: PatchedModel) -> tuple[str, ...]:
    """Return the names of the weights with a model's convolution kernels."""
    return WHERE if "short_conv" in mixer_kinds(patched) else ("ssm_conv1d",)


def _patch_kernel(taken: Callable[[Array, Array], tuple[Array, Array]]) -> Patch:
    """Return a patch that gives a convolution another window and kernel.

    `taken` is the function that makes the new (window, kernel) of the old ones.
    """

    def override(op: Any, at: Any, window: Any, kernel: Any, *bias: Any) -> Any:
        """Return the convolution of the window and kernel that the mistake `taken` gives."""
        return op(*taken(window, kernel), *bias)

    return lambda patched, layers: patched.with_op("convolve", override, layers)


def _without_gate(point: str) -> Patch:
    """Return a patch that leaves out the convolution's gate at capture point `point`."""

    def override(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return `b` without its gate `a` at capture point `point`, the product a * b elsewhere."""
        return b if at.point == point else op(a, b)

    return lambda patched, layers: patched.with_op("mul", override, layers)


def _gate_last_with(part: int) -> Patch:
    """Return a patch that exchanges the gates before and after the convolution.

    The input projection's columns are three equal parts: two gates and what is convolved. Part
    `part` (0 to 2) is multiplied after the convolution, and the product of the two others is
    convolved.
    """

    def thirds(held: Mapping[str, Any]) -> list[Any]:
        """Return the three parts of the input projection's result, split along the channels.

        `held` has that result by its point's name.
        """
        return list(np.split(np.asarray(held["conv_in"]), 3, axis=-1))

    def before(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return what is convolved in the exchanged order: the product of the other two parts.

        Those are the columns of the input projection other than part number `part`. `held` has the
        layer's earlier points by name.
        """
        first, second = (each for i, each in enumerate(thirds(held)) if i != part)
        return first * second

    def after(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return the convolution's result times part number `part` of the input projection.

        `held` has the layer's earlier points by name.
        """
        return thirds(held)[part] * np.asarray(held["conv"])

    return lambda patched, layers: patched.with_tap("conv_x", before, layers).with_tap(
        "conv_gated", after, layers
    )


def _begin_with_rows(before: Array) -> Patch:
    """Return a patch: the convolution sees the rows `before` in place of zeros before token 0.

    `before` is [taps - 1, channels].
    """

    def override(op: Any, at: Any, window: Any, kernel: Any, *bias: Any) -> Any:
        """Return the convolution whose window begins with the rows `before` in place of zeros."""
        return op(np.concatenate([before, window[len(before) :]]), kernel, *bias)

    return lambda patched, layers: patched.with_op("convolve", override, layers)


def _begin_with_own_rows(chosen: Callable[[Array, int], Array]) -> Patch:
    """Return a patch: the convolution begins with rows of the sequence in place of zeros.

    `chosen` returns them, of the sequence's rows and their count.
    """

    def override(op: Any, at: Any, window: Any, kernel: Any, *bias: Any) -> Any:
        """Return the convolution whose window begins with rows of its own sequence."""
        back = kernel.shape[1] - 1
        own = window[back:]
        return op(np.concatenate([chosen(own, back), own]), kernel, *bias)

    return lambda patched, layers: patched.with_op("convolve", override, layers)


def _looks_back_wrongly(case: Mismatch) -> int:
    """Return the number of tokens that look back before the first, if only these may be wrong.

    0 where a later token differs, none of them does, or the point needs no convolution.
    """
    call = case.call("convolve")
    if call is None or int(case.rows[0]) != 0:
        return 0
    back = int(case.array(call.args[1]).shape[1]) - 1
    away = case.distances_by_row(case.view) > 2 * case.view.tolerance
    wrong = len(away) > back > 0 and away[:back].any() and not away[back:].any()
    return back if wrong else 0


def _solve_rows_behind_products(case: Mismatch, back: int) -> Array | None:
    """Return the rows [back, channels] before token 0 that give a point behind gate and product.

    `back` is the number of tokens that look back on them. None where another operation than a gate
    and a product lies between the convolution and the point, or no rows give it.
    """
    calls = [call for call in case.view.calls if call.op not in MOVES]
    places = [at for at, call in enumerate(calls) if call.op == "convolve"]
    after = calls[places[-1] + 1 :]
    if not after or not case.gives_point_value(after[-1]):
        return None
    mine, theirs = (np.asarray(x, np.float64) for x in (case.view.mine, case.view.theirs))
    missing = (theirs - mine)[:back]
    for call in reversed(after):
        if call.op == "linear":
            weight = np.asarray(call.args[1].numpy(), np.float64)
            found: Array = np.linalg.lstsq(weight, missing.T, rcond=1e-9)[0].T
            if rel_l2(found @ weight.T, missing) > case.view.tolerance:
                return None
            missing = found
        elif call.op == "mul":
            gate = case.array(call.args[0])[:back].astype(np.float64)
            missing = np.divide(missing, gate, out=np.zeros_like(missing), where=gate != 0)
        else:
            return None
    window, kernel = (case.array(x).astype(np.float64) for x in calls[places[-1]].args[:2])
    before = window[:back] + _rows_of_results(kernel, missing)
    return np.asarray(before, case.array(calls[places[-1]].args[0]).dtype)


def _rows_of_results(kernel: Array, missing: Array) -> Array:
    """Return the rows [back, channels] before token 0 that add `missing` to the first results.

    `kernel` is [channels, taps], `missing` is [back, channels].
    """
    back, found = len(missing), np.zeros_like(missing)
    for channel in range(kernel.shape[0]):
        # Token t reads row t + i of the window by tap i; only rows before the first are sought.
        taps = np.zeros((back, back))
        for token in range(back):
            taps[token, token:] = kernel[channel, : back - token]
        found[:, channel] = np.linalg.lstsq(taps, missing[:, channel], rcond=1e-6)[0]
    return found


def _solve_rows_before(case: Mismatch) -> Array | None:
    """Return the rows [taps - 1, channels] before token 0 that explain the trace's values.

    None unless the trace has the convolution's result from the first token on, and it differs
    from the reference only in the tokens that look back to these rows.
    """
    call = case.call("convolve")
    theirs = None if call is None else case.recorded_result(call)
    if call is None or theirs is None or int(case.rows[0]) != 0:
        return None
    back = _looks_back_wrongly(case)
    if not back:
        return None
    window, kernel = (case.array(x).astype(np.float64) for x in call.args[:2])
    missing = theirs[:back].astype(np.float64) - case.array(call.result)[:back]
    before = window[:back] + _rows_of_results(kernel, missing)
    return np.asarray(before, case.array(call.args[0]).dtype)


HYPOTHESES = (
    Hypothesis(
        "convolution", try_convolution_mistakes, 350, "a function of the layer's own inputs"
    ),
    Hypothesis(
        "conv_state", try_convolution_mistakes, 360, "the same proposals, under the state's name"
    ),
)
