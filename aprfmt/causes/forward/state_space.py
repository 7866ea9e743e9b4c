"""Hypotheses about state space mixers: decays, time steps, operands, the state, the gate.

A *group* is the heads of a mixer that share B and C.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.causes.forward.convolution import mixer_kinds, starts_to_try
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    hyper_change,
)
from aprfmt.causes.forward.product import scale_weights_change, zero_weights_change
from aprfmt.causes.forward.residual_stream import factor_change
from aprfmt.causes.forward.state_restarts import restart_scan, scan_in_parts
from aprfmt.causes.row import Cause
from aprfmt.inference.point_placement import mixer_of_layer
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "ssm_decay", "forward", "bug",
        "The states of a scan decay at other rates: A is not negated, its exponential is left out "
        "or taken twice.",
        "What a scan reads differs from the second token on, and its time steps are equal.",
        "Scanning with the named rates is equal.",
    ),
    Cause(
        "ssm_step", "forward", "bug",
        "Time steps are made otherwise: without their softplus or with two, without their limits "
        "or with others, or with the bias last.",
        "Raw time steps are equal, those after bias and softplus differ.",
        "Time steps made in the named way are equal.",
        keys=("ssm_step_low", "ssm_step_high"),
    ),
    Cause(
        "ssm_scan", "forward", "bug",
        "A scan takes other operands: B and C exchanged, groups that serve other heads, B without "
        "its time step or discretised by another rule, or another skip D x.",
        "Time steps and the convolution are equal; what is read differs in the first token too.",
        "Scanning with the named operands is equal.",
        keys=("ssm_heads", "ssm_groups"),
    ),
    Cause(
        "ssm_state", "forward", "bug",
        "A scan goes on from another state than that of the tokens before: it was not reset "
        "between sequences, or not carried from step to step.",
        "The first tokens of a sequence or of a step differ most, less the further on.",
        "Scanning from the named state is equal.",
    ),
    Cause(
        "ssm_gate", "forward", "bug",
        "The gate after a scan or its norm is applied otherwise: in the other order, over all "
        "groups together, by another function, or not at all.",
        "What is read from the state is equal, and differs after the gate.",
        "Gating and normalising in the named way is equal.",
        keys=("ssm_norm", "ssm_norm_first"),
    ),
)  # fmt: skip

BIAS = ".ssm_dt.bias"
LEFT_OUT = 1e-2  # how near to 0 or 2 a multiple of dt_bias is no number of its own
TIMES = (0.1, 0.25, 0.5, 0.75, 1.5, 3.0, 10.0)  # multiples of dt_bias to begin a search at
# Cause -> its place: a role, or the point after it.
PLACES: Mapping[str, str] = {
    "ssm_decay": "ssm_a", "ssm_step": "ssm_step", "ssm_scan": "ssm_scan", "ssm_state": "ssm_state",
    "ssm_gate": "ssm_gated",
}  # fmt: skip
FACTORS = (
    "attn_in_scale", "attn_out_scale", "key_scale", "ssm_in_scale", "ssm_out_scale",
    "ffn_gate_scale", "ffn_down_scale",
)  # fmt: skip
# Parts of the product that ssm_scales multiply, and the points that hold them.
PARTS = ("the gate", "x", "B", "C", "time steps")
MULTIPLIED = ("ssm_gate", "ssm_conv_in", "ssm_dt")
# The operands of `scan`, in order: x, step, rate, b, c, skip, state.
Operands = tuple[Any, ...]


def _replace_rates(change: Callable[[Array], Array]) -> Callable[[Operands], Operands]:
    """Return a function on a scan's operands that replaces the decay rates by change(rates)."""
    return lambda given: (*given[:2], change(given[2]), *given[3:])


def _deal_groups(given: Operands) -> Operands:
    """Return a scan's operands with B and C assigned in turn: head h gets group h mod groups."""
    x, step, rate, b, c, skip, state = given
    heads, groups = x.shape[1], b.shape[1]
    order = np.arange(heads) % groups
    return x, step, rate, b[:, order], c[:, order], skip, state


def _use_first_group(given: Operands) -> Operands:
    """Return a scan's operands with only the first group's B and C, used by all heads."""
    x, step, rate, b, c, skip, state = given
    return x, step, rate, b[:, :1], c[:, :1], skip, state


def _exchange_b_and_c(given: Operands) -> Operands:
    """Return a scan's operands with B and C exchanged."""
    x, step, rate, b, c, skip, state = given
    return x, step, rate, c, b, skip, state


def _times_step(factor: Callable[[Array, Array], Array]) -> Callable[[Operands], Operands]:
    """Return a function on a scan's operands that multiplies B by factor(step, rate).

    `step` is given as [tokens, heads, 1] and `rate` as [heads, 1] or [heads, state]. B and C are
    given to each head then: [tokens, heads, state].
    """

    def taken(given: Operands) -> Operands:
        """Return the operands with B multiplied."""
        x, step, rate, b, c, skip, state = given
        b, c = (np.repeat(y, x.shape[1] // y.shape[1], axis=1) for y in (b, c))
        rates = rate if rate.ndim == 2 else rate[:, None]
        times = factor(step[..., None].astype(np.float64), rates.astype(np.float64))
        return x, step, rate, (b * times).astype(b.dtype), c, skip, state

    return taken


def _exact_factor(step: Array, rate: Array) -> Array:
    """Return (exp(step rate) - 1) / (step rate): what exact discretisation makes of step times B.

    It is 1 where step times rate is 0.
    """
    grown = step * rate
    factor: Array = np.divide(np.expm1(grown), grown, out=np.ones_like(grown), where=grown != 0)
    return factor


def _replace_skip(change: Callable[[Array], Array]) -> Callable[[Operands], Operands]:
    """Return a function on a scan's operands that replaces the skip factors D by change(D)."""
    return lambda given: (*given[:5], change(given[5]), given[6])


# What is said -> cause, and the operands as the engine took them.
TAKEN: Mapping[str, tuple[str, Callable[[Operands], Operands]]] = {
    "A is not negated: states grow where they should decay": (
        "ssm_decay",
        _replace_rates(lambda rate: -rate),
    ),
    "A is taken as it is stored, a logarithm without its exponential": (
        "ssm_decay",
        _replace_rates(lambda rate: np.log(-rate)),
    ),
    "the exponential of A is left out: the decay is minus what is stored": (
        "ssm_decay",
        _replace_rates(lambda rate: -np.log(-rate)),
    ),
    "A is exponentiated twice, as where a GGUF's is taken for a logarithm": (
        "ssm_decay",
        _replace_rates(lambda rate: -np.exp(rate)),
    ),
    "exp is taken twice of A_log": ("ssm_decay", _replace_rates(lambda rate: -np.exp(-rate))),
    "A is left out: all rates are -1": ("ssm_decay", _replace_rates(lambda rate: rate * 0 - 1)),
    "no state decays": ("ssm_decay", _replace_rates(lambda rate: rate * 0)),
    "B and C are exchanged": ("ssm_scan", _exchange_b_and_c),
    "the groups' B and C serve the heads in turn, not heads in a row": ("ssm_scan", _deal_groups),
    "the first group's B and C serve all heads": ("ssm_scan", _use_first_group),
    "B is discretised exactly, by (exp(dt A) - 1) / A, not by the time step": (
        "ssm_scan",
        _times_step(_exact_factor),
    ),
    "B is discretised by the bilinear rule, dt / (1 - dt A / 2), not by the time step": (
        "ssm_scan",
        _times_step(lambda step, rate: 1 / (1 - step * rate / 2)),
    ),
    "B is not multiplied by the time step": (
        "ssm_scan",
        _times_step(lambda step, rate: 1 / np.maximum(step, 1e-30)),
    ),
    "what skips the state (D x) is left out": ("ssm_scan", _replace_skip(lambda skip: skip * 0)),
    "what skips the state is x itself: D is 1": (
        "ssm_scan",
        _replace_skip(lambda skip: skip * 0 + 1),
    ),
    "what skips the state is taken away": ("ssm_scan", _replace_skip(lambda skip: -skip)),
    "what skips the state is added twice": ("ssm_scan", _replace_skip(lambda skip: 2 * skip)),
}
# What is said -> cause, and the time steps of raw ones, bias, and limits.
Steps = Callable[[Any, Array, "Array | None", float, float], Array]
STEPS: Mapping[str, Steps] = {
    "all time steps are 1": lambda op, raw, bias, low, high: raw * 0 + 1,
    "time steps have no softplus": lambda op, raw, bias, low, high: np.asarray(
        (raw if bias is None else raw + bias).clip(low, high)
    ),
    "the softplus of time steps is taken twice": lambda op, raw, bias, low, high: op(
        op(raw, bias, 0.0, np.inf), None, low, high
    ),
    "time steps are kept between 0.001 and 0.1, the bounds of those that training begins with": (
        lambda op, raw, bias, low, high: op(raw, bias, 0.001, 0.1)
    ),
    "time steps are not limited": lambda op, raw, bias, low, high: op(raw, bias, 0.0, np.inf),
    "the bias is added after the softplus": lambda op, raw, bias, low, high: np.asarray(
        op(raw, None, 0.0, np.inf) + (0 if bias is None else bias)
    ).clip(low, high),
}  # fmt: skip
# What is said -> how the gate and its norm are applied, by options of `gated_scan`.
Gate = Callable[[Any, Any, Any, Any, Mapping[str, Any]], Any]
GATES: Mapping[str, Gate] = {
    "the norm stands on the other side of the gate": lambda op, x, gate, weight, how: op(
        x, gate, weight, **{**how, "first": not how["first"]}
    ),
    "the norm is over all groups together": lambda op, x, gate, weight, how: op(
        x, gate, weight, **{**how, "groups": 1}
    ),
    "the gate's norm has no weight: it is taken as ones": lambda op, x, gate, weight, how: op(
        x, gate, np.ones_like(weight), **how
    ),
    "the gate's norm is left out": lambda op, x, gate, weight, how: op(x, gate, None, **how),
    "the gate is left out": lambda op, x, gate, weight, how: op(
        x, np.full_like(gate, OPEN), weight, **how
    ),
    "the gate is a sigmoid, not silu": lambda op, x, gate, weight, how: op(
        x, _inverse_silu_of_sigmoid(gate), weight, **how
    ),
}
OPEN = 1.278464542761074  # silu of this is 1


def _inverse_silu_of_sigmoid(gate: Array) -> Array:
    """Return z with silu(z) = sigmoid(gate), element by element, by Newton's method."""
    wanted = 1 / (1 + np.exp(-gate.astype(np.float64)))
    z = wanted + 0.5
    for _ in range(30):
        s = 1 / (1 + np.exp(-z))
        z = z - (z * s - wanted) / (s * (1 + z * (1 - s)))
    return np.asarray(z, gate.dtype)


def usual_scan_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of state space mixers; none for models without them."""
    kinds = {"mamba", "mamba2"} & mixer_kinds(patched)
    if not kinds:
        return
    hp = patched.hp
    shifts = [key for key in patched.weights if key.endswith(BIAS)]
    # The bias of time steps.
    if shifts:
        says = "no dt_bias is added before the time step's softplus"
        yield zero_weights_change("missing_bias", says, shifts, patched)
        says = "dt_bias is added twice before the time step's softplus"
        yield scale_weights_change("repeated_bias", says, shifts, patched, 2.0)
    grouped = "mamba2" in kinds and int(hp["ssm_groups"]) > 1
    # Other operands, time steps, gates and states.
    for says, (cause, taken) in TAKEN.items():
        if "group" not in says or grouped:
            place = "ssm_d" if "skips" in says else PLACES[cause]
            yield Change(cause, says, (place,), _patch_operands(taken), {"scan": says})
    limited = float(hp["ssm_step_low"]) > 0 or hp["ssm_step_high"] is not None
    for says, step in STEPS.items():
        if "limited" not in says or limited:
            yield _scan_change("ssm_step", says, _patch_time_step(step))
    for says, gate in GATES.items():
        if "norm" not in says or (hp["ssm_norm"] and ("groups" not in says or grouped)):
            yield _scan_change("ssm_gate", says, _patch_gate(gate))
    yield _scan_change(
        "ssm_state", "no state is carried: every token sees itself only", _restart_every_tokens(1)
    )
    yield Change(
        "activation",
        "the activation after the convolution is left out",
        ("conv",),
        _without_activation,
        {"conv": "linear"},
    )


def _scan_change(cause: str, says: str, make: Patch, **how: Any) -> Change:
    """Return a change of the scan made by patch `make`, with the sentence `says` about it.

    It names the place that PLACES has for the cause. `how` are other fields of Change.
    """
    place = PLACES[cause]
    return Change(cause, says, (place,), make, {place: says}, **how)


def _without_activation(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model without the activation after its convolution."""

    def override(op: Any, at: Any, x: Any, kind: str, **kwargs: Any) -> Any:
        """Return `x` unchanged after the mixer's convolution, the activation of `x` elsewhere."""
        return x if at.point == "ssm_conv_in" else op(x, kind, **kwargs)

    return patched.with_op("activate", override, layers)


def try_multipliers(case: Mismatch) -> Iterator[Change]:
    """Yield changes that leave out each multiplier of a projection (falcon_h1), or divide by it."""
    hp = case.patched.hp
    if case.patched.spec.block.multipliers == "none":
        return
    for name in FACTORS:
        configured = float(hp[name])
        if configured not in (0.0, 1.0):
            yield factor_change(name, 1.0, configured)
            yield factor_change(name, 1 / configured, configured)
    # A dump's product has the model's factors, whatever the run had: without it they are free.
    held = {
        f"L{layer}.{point}" for layer in range(case.patched.n_layers) for point in MULTIPLIED
    } & {key for key, view in case.found.views.items() if view.recorded is not None}
    for says, listed in _other_factor_lists(tuple(float(one) for one in hp["ssm_scales"])):
        change = hyper_change("multiplier", says, ssm_scales=listed)
        if held and case.view.point not in MULTIPLIED:
            change = replace(change, drop=frozenset(held))
            if not case.trial(change) <= case.view.tolerance:
                continue
        yield change


def _other_factor_lists(own: tuple[float, ...]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield (sentence, factors) of usual wrong factors on a mixer's inputs; `own` are the model's.

    They are all left out, one left out, or two exchanged.
    """
    if any(factor != 1 for factor in own):
        yield f"ssm_scales are left out; the model says {list(own)}", (1.0,) * len(own)
    for one, name in enumerate(PARTS):
        if own[one] != 1:
            says = f"ssm_scales has no factor on {name}; the model says {own[one]:g}"
            yield says, (*own[:one], 1.0, *own[one + 1 :])
        for other in range(one + 1, len(PARTS)):
            if own[one] != own[other]:
                turned = list(own)
                turned[one], turned[other] = own[other], own[one]
                yield f"ssm_scales of {name} and {PARTS[other]} are exchanged", tuple(turned)


def try_scan_mistakes(case: Mismatch) -> Iterator[Change]:
    """Yield changes of a state space mixer's scan, for points in a layer that has one.

    They are the usual mistakes, a state that is reset before the first wrong row, and another
    initial state.
    """
    block, hp = case.patched.spec.block, case.patched.hp
    if case.layer < 0 or mixer_of_layer(block, hp, case.layer) not in ("mamba", "mamba2"):
        return
    yield from usual_scan_mistakes(case.patched)
    for first in starts_to_try(case):
        says = f"no state is carried to token {first}: the scan begins with zeros there"
        yield _scan_change("ssm_state", says, restart_scan([0, first]))
    call = case.call("scan")
    if call is None:
        return
    before = _solve_state_before(case)
    if before is not None:
        says = "the state is not reset: the scan begins with that of another sequence"
        yield _scan_change("ssm_state", says, _begin_with_state(before), general=True)


def _patch_operands(taken: Callable[[Operands], Operands]) -> Patch:
    """Return a patch that gives the scan other operands: what `taken` makes of its own ones."""

    def override(op: Any, at: Any, *given: Any) -> Any:
        """Return the state space scan's result with the operands that the mistake `taken` gives."""
        return op(*taken(given))

    return lambda patched, layers: patched.with_op("scan", override, layers)


def _patch_time_step(step: Steps) -> Patch:
    """Return a patch that computes the scan's time steps by `step`."""

    def override(op: Any, at: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
        """Return the scan's time steps by the mistaken formula `step`, from raw steps and bias.

        `low` and `high` are the limits of a time step.
        """
        return step(op, raw, bias, low, high)

    return lambda patched, layers: patched.with_op("time_step", override, layers)


def _patch_gate(change: Gate) -> Patch:
    """Return a patch: the scan's gate and norm are computed by `change`."""

    def override(op: Any, at: Any, x: Any, gate: Any, weight: Any, **how: Any) -> Any:
        """Return the scan's result `x`, gated and normalised by the mistaken formula `change`."""
        return change(op, x, gate, weight, how)

    return lambda patched, layers: patched.with_op("gated_scan", override, layers)


def _restart_every_tokens(count: int) -> Patch:
    """Return a patch function: the scan's state is set to zero before every `count`-th token."""

    def override(op: Any, at: Any, *given: Any) -> Any:
        """Return (values read, last state) of a scan emptied every `count` tokens."""
        return scan_in_parts(op, given, range(0, len(given[0]), count))

    return lambda patched, layers: patched.with_op("scan", override, layers)


def _begin_with_state(before: Array) -> Patch:
    """Return a patch: the scan begins with state `before` in place of zeros."""

    def override(op: Any, at: Any, *given: Any) -> Any:
        """Return the scan's result with `before` as its first state, not the given one."""
        return op(*given[:-1], before.astype(given[0].dtype))

    return lambda patched, layers: patched.with_op("scan", override, layers)


def _solve_state_before(case: Mismatch) -> Array | None:
    """Return the initial state that explains the trace's values, or None.

    It is [heads, head_dim, state]. None unless the trace has the scan's result from the first
    token on. What a state adds to a token's output is the decayed state times C: a linear system
    for each row of the state.
    """
    call = case.call("scan")
    theirs = None if call is None else case.recorded_result(call)
    if call is None or theirs is None or int(case.rows[0]) != 0:
        return None
    step, rate, b, c = (case.array(y).astype(np.float64) for y in call.args[1:5])
    read = case.array(call.result).astype(np.float64)
    missing = theirs.astype(np.float64).reshape(read.shape) - read
    _, heads, width = read.shape
    total = np.cumsum(step, axis=0)  # (token, head)
    each, found = heads // b.shape[1], np.zeros((heads, width, b.shape[2]))
    for head in range(heads):
        kept = np.exp(total[:, head, None] * np.atleast_1d(rate[head]))  # (token, 1 or state)
        seen = kept * c[:, head // each]
        found[head] = np.linalg.lstsq(seen, missing[:, head], rcond=1e-6)[0].T
    return found


def solve_step_bias(case: Mismatch) -> Iterator[Change]:
    """Yield the change with the number that dt_bias is multiplied by before its softplus.

    For layers of state spaces and of delta nets that have such a bias.
    """
    block, hp = case.patched.spec.block, case.patched.hp
    kinds = ("mamba", "mamba2", "gated_delta", "kimi_delta")
    if case.layer < 0 or mixer_of_layer(block, hp, case.layer) not in kinds:
        return
    shifts = [key for key in case.patched.weights if key.endswith(BIAS)]

    def make(times: float) -> Change:
        """Return the change that multiplies dt_bias by `times` in all layers."""
        says = f"dt_bias is multiplied by {times:.6g} before the softplus"
        return scale_weights_change("scale", says, shifts, case.patched, times)

    for change in case.best_number(make, TIMES) if shifts else ():
        times = float(change.values["times"])
        if min(abs(times), abs(times - 2)) > LEFT_OUT:  # else it is missing, or added twice
            yield change


HYPOTHESES = (
    Hypothesis("multiplier", try_multipliers, 342, "a factor explains more than a rule of a state"),
    Hypothesis("ssm_decay", try_scan_mistakes, 344, "the rule of a state, after a delta net's"),
    Hypothesis("ssm_step", try_scan_mistakes, 345, "the rule of a state, after a delta net's"),
    Hypothesis("ssm_scan", try_scan_mistakes, 346, "the rule of a state, after a delta net's"),
    Hypothesis("ssm_state", try_scan_mistakes, 347, "the rule of a state, after a delta net's"),
    Hypothesis("ssm_gate", try_scan_mistakes, 348, "the rule of a state, after a delta net's"),
    Hypothesis("scale", solve_step_bias, 349, "a fitted number, after rules of a state"),
)
