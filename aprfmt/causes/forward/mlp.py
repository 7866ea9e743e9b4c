"""Hypotheses about the MLP's activation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aprfmt.causes.forward.mismatch import Change, Hypothesis, Layers, Mismatch
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "activation", "config", "bug",
        "Another activation function: gelu with erf for tanh, silu for gelu, a clamp left out.",
        "The inputs of the activation are equal, its outputs are another function of them.",
        "The named function gives the other side's values.",
        keys=("activation", "swiglu_limit", "swiglu_alpha"),
    ),
)  # fmt: skip

KINDS = ("silu", "gelu", "gelu_tanh", "relu")


def activation(case: Mismatch) -> Iterator[Change]:
    """Try every activation function on the same input."""
    if case.call("activate") is not None:
        yield from activations(case.patched)


def activations(patched: PatchedModel) -> Iterator[Change]:
    """Yield the changes to every other activation function."""
    told = str(patched.hp["activation"])
    for kind in KINDS:
        if kind != told:
            says = f"the activation is {kind}; the model says {told}"
            yield Change("activation", says, ("activation",), activated(kind), {"activation": kind})


def activated(kind: str) -> Any:
    """Return a maker: the MLP's activation is another function."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, x: Any, told: str, **kwargs: Any) -> Any:
            return op(x, kind, **kwargs)

        return patched.with_op("activate", override, layers)

    return make


def clamp(case: Mismatch) -> Iterator[Change]:
    """Try gpt-oss's activation without its clamp, and with other gains."""
    call = case.call("swiglu_oai")
    if call is None:
        return
    limit, alpha = float(call.args[2]), float(call.args[3])
    tries = [(1e30, alpha), (limit, 1.0), (limit, 1.702), (7.0, alpha)]
    for other, gain in tries:
        if (other, gain) != (limit, alpha):
            yield Change(
                "activation",
                "gate and up are not clamped"
                if other >= 1e30
                else f"gate and up are clamped at {other:g} with gain {gain:g}; the model says "
                f"{limit:g} and {alpha:g}",
                ("swiglu_limit",) if other != limit else ("swiglu_alpha",),
                _clamped(other, gain),
                {"swiglu_limit": None if other >= 1e30 else other, "swiglu_alpha": gain},
            )


# What may be done to xIELU's numbers: positive, negative, beta, eps.
_BENT: Mapping[str, Callable[[float, float, float, float], tuple[float, ...]]] = {
    "beta is not added to the second alpha": lambda up, down, beta, eps: (
        up,
        down - beta,
        beta,
        eps,
    ),
    "the alphas stand in each other's place": lambda up, down, beta, eps: (down, up, beta, eps),
    "the straight part is left out": lambda up, down, beta, eps: (up, down, 0.0, eps),
}


def bent(case: Mismatch) -> Iterator[Change]:
    """Try the layers' own activation (xIELU) with its numbers taken otherwise."""
    if case.call("xielu") is None:
        return
    for says, change in _BENT.items():
        yield Change("activation", says, ("activation",), _bent(change))


def _bent(change: Callable[[float, float, float, float], tuple[float, ...]]) -> Any:
    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, x: Any, *told: float) -> Any:
            return op(x, *change(*told))

        return patched.with_op("xielu", override, layers)

    return make


def _clamped(limit: float, alpha: float) -> Any:
    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, gate: Any, up: Any, *told: float) -> Any:
            return op(gate, up, limit, alpha)

        return patched.with_op("swiglu_oai", override, layers)

    return make


HYPOTHESES = (
    Hypothesis("activation", activation, 380, "known functions, before solved ones"),
    Hypothesis("activation", clamp, 390, "one limit of the known function"),
    Hypothesis("activation", bent, 400, "one parameter of the known function"),
)
