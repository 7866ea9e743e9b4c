"""Hypotheses about state space scans (Mamba, Mamba 2): rates, time steps, skip, gate and norm."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.convolution import mixers
from aprfmt.causes.forward.mismatch import Change, Hypothesis, Layers, Mismatch
from aprfmt.causes.forward.product import scaled_vectors, zeroed
from aprfmt.inference.replay.patched_model import PatchedModel

Array = NDArray[Any]
Make = Callable[[PatchedModel, Layers], PatchedModel]
BIAS = ".ssm_dt.bias"

# What is said -> the rates, of the stored A_log.
RATES: Mapping[str, Callable[[Array], Array]] = {
    "A_log is taken as it is stored, without exp": lambda logs: logs,
    "minus A_log is taken, without exp": lambda logs: -logs,
    "exp is taken twice of A_log": lambda logs: -np.exp(np.exp(logs)),
    "exp is taken of minus exp(A_log)": lambda logs: -np.exp(-np.exp(logs)),
    "nothing decays": lambda logs: 0 * logs,
    "A_log is left out: all rates are -1": lambda logs: 0 * logs - 1,
}
# What is said -> the skip, of the stored D.
SKIPS: Mapping[str, Callable[[Array], Array]] = {
    "the skip D is left out": lambda skip: 0 * skip,
    "the skip D is 1 everywhere": lambda skip: 0 * skip + 1,
    "the skip D is taken away": lambda skip: -skip,
    "the skip D is added twice": lambda skip: 2 * skip,
}


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


# What is said -> the time step, of the product, its bias and the limits.
STEPS: Mapping[str, Callable[[Array, Array, float, float], Array]] = {
    "dt_bias is added behind the softplus": lambda raw, dt, low, high: np.clip(
        _softplus(raw) + dt, low, high
    ),
    "the softplus is left out": lambda raw, dt, low, high: np.clip(raw + dt, low, high),
    "the time step is not clamped": lambda raw, dt, low, high: _softplus(raw + dt),
    "the time step is 1": lambda raw, dt, low, high: 0 * raw + 1,
}


def state_spaces(patched: PatchedModel) -> Iterator[Change]:
    """Yield the usual mistakes of a model's state space scans; none of a model without them."""
    if not {"mamba", "mamba2"} & mixers(patched):
        return
    shifts = [key for key in patched.weights if key.endswith(BIAS)]
    if shifts:
        says = "no dt_bias is added before the time step's softplus"
        yield zeroed("missing_bias", says, shifts, patched)
        says = "dt_bias is added twice before the time step's softplus"
        yield scaled_vectors("missing_bias", says, shifts, patched, 2.0)
    for says, rates in RATES.items():
        yield _change(says, "ssm_a", _with("rates", 0, rates))
    for says, skips in SKIPS.items():
        yield _change(says, "ssm_d", _with("scan", 5, skips))
    for says, steps in STEPS.items():
        yield _change(says, "ssm_step", _stepped(steps))
    yield _change("B and C are exchanged", "ssm_scan", _exchanged)
    yield _change("the output gate is left out", "ssm_gated", _ungated)
    yield _change("the norm stands on the other side of the output gate", "ssm_gated", _late)
    yield _change("the activation behind the convolution is left out", "conv", _linear)


def state_space(case: Mismatch) -> Iterator[Change]:
    """Try the usual mistakes of a scan where one lies before the point."""
    if case.layer >= 0 and case.call("time_step", "scan", "gated_scan") is not None:
        yield from state_spaces(case.patched)


def _change(says: str, where: str, make: Make) -> Change:
    return Change("recurrence", f"in the state space {says}", (where,), make, {where: says})


def _with(op: str, place: int, how: Callable[[Array], Array]) -> Make:
    """Return a maker: one argument of an operation is another one."""

    def override(op: Any, at: Any, *args: Any) -> Any:
        if place == 0:
            return np.asarray(how(args[0]), args[0].dtype)
        changed = np.asarray(how(args[place]), args[place].dtype)
        return op(*args[:place], changed, *args[place + 1 :])

    return lambda patched, layers: patched.with_op(op, override, layers)


def _stepped(how: Callable[[Array, Array, float, float], Array]) -> Make:
    def override(op: Any, at: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
        shift = np.zeros(raw.shape[-1], raw.dtype) if bias is None else bias
        return np.asarray(how(raw, shift, low, high), raw.dtype)

    return lambda patched, layers: patched.with_op("time_step", override, layers)


def _exchanged(patched: PatchedModel, layers: Layers) -> PatchedModel:
    def override(op: Any, at: Any, x: Any, step: Any, rate: Any, b: Any, c: Any, *rest: Any) -> Any:
        return op(x, step, rate, c, b, *rest)

    return patched.with_op("scan", override, layers)


def _ungated(patched: PatchedModel, layers: Layers) -> PatchedModel:
    def override(op: Any, at: Any, x: Any, gate: Any, *rest: Any, **kwargs: Any) -> Any:
        one = gate.dtype.type(1.2784645427610738)  # where silu is 1
        return op(x, 0 * gate + one, *rest, **kwargs)

    return patched.with_op("gated_scan", override, layers)


def _late(patched: PatchedModel, layers: Layers) -> PatchedModel:
    def override(op: Any, at: Any, *args: Any, first: bool, **kwargs: Any) -> Any:
        return op(*args, first=not first, **kwargs)

    return patched.with_op("gated_scan", override, layers)


def _linear(patched: PatchedModel, layers: Layers) -> PatchedModel:
    def override(op: Any, at: Any, x: Any, kind: str, **kwargs: Any) -> Any:
        return x if at.point == "ssm_conv_in" else op(x, kind, **kwargs)

    return patched.with_op("activate", override, layers)


HYPOTHESES = (
    Hypothesis("recurrence", state_space, 346, "the rule of a state, after a delta net's"),
)
