"""Hypotheses about the MLP's activation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Change, Hypothesis, Layers, Mismatch, Patch
from aprfmt.causes.forward.product import remember_product
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "activation", "config", "bug",
        "Another activation function: gelu with erf for tanh, silu for gelu, a clamp left out.",
        "The inputs of the activation are equal, its outputs are another function of them.",
        "The named function gives the other side's values.",
        keys=("activation", "swiglu_limit", "swiglu_alpha", "ssm_activation", "ffn_sparsity"),
    ),
)  # fmt: skip

KINDS = ("silu", "gelu", "gelu_tanh", "relu")


def try_activations(case: Mismatch) -> Iterator[Change]:
    """Yield changes to each other activation function, if the point depends on an activation."""
    if case.call("activate") is not None:
        yield from activation_changes(case.patched)


def try_exchanged_gate_and_up(case: Mismatch) -> Iterator[Change]:
    """Yield the change that exchanges gate and up, where the trace has both products."""
    roles = ("ffn_gate", "ffn_up")
    recorded = all(case.recorded.value_of(f"L{case.layer}.{name}") is not None for name in roles)
    if recorded and any(call.op in ("activate", "mul") for call in case.view.calls):
        says = "the activation is taken of up, and multiplies gate"
        where = tuple(f"{name}.weight" for name in roles)
        yield Change("swapped_tensors", says, where, exchange_gate_and_up)


def exchange_gate_and_up(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose dense MLP in `layers` computes act(up) * gate.

    It needs both products before the activation, as in a pass that records them.
    """
    held: dict[str, Any] = {}
    role = "ffn_up.weight"

    def activate(op: Any, at: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return the activation of the MLP's up product in place of its gate `x`, which is kept.

        `held` has the up product before and the gate after; without an up product it is that of
        `x`.
        """
        up = held.pop(role, None)
        if up is None or up.shape != x.shape:
            return op(x, *rest, **kwargs)
        held["gate"] = x
        return op(up, *rest, **kwargs)

    def mul(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return the activation times the gate, where it was taken of up.

        Elsewhere it returns a * b.
        """
        return op(a, held.pop("gate", b))

    patched = patched.with_op("linear", remember_product(role, held), layers)
    return patched.with_op("activate", activate, layers).with_op("mul", mul, layers)


def activation_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield the changes to every other activation function of KINDS."""
    configured = str(patched.hp["activation"])
    for kind in KINDS:
        if kind != configured:
            says = f"the activation is {kind}; the model says {configured}"
            yield Change(
                "activation", says, ("activation",), use_activation(kind), {"activation": kind}
            )


def use_activation(kind: str) -> Patch:
    """Return a patch that makes the MLP's activation the function `kind`."""

    def override(op: Any, at: Any, x: Any, configured: str, **kwargs: Any) -> Any:
        """Return the activation function `kind` of `x`.

        The model's `configured` one is not used.
        """
        return op(x, kind, **kwargs)

    return lambda patched, layers: patched.with_op("activate", override, layers)


def try_clamps(case: Mismatch) -> Iterator[Change]:
    """Yield changes of gpt-oss's activation: without its clamp, and with other limits and gains.

    Nothing if the point does not depend on it.
    """
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
                _clamp_activation(other, gain),
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


def try_xielu_numbers(case: Mismatch) -> Iterator[Change]:
    """Yield changes of how the activation xIELU uses its learned numbers."""
    if case.call("xielu") is None:
        return
    for says, change in _BENT.items():
        yield Change("activation", says, ("activation",), _change_xielu(change))


def _change_xielu(change: Callable[[float, float, float, float], tuple[float, ...]]) -> Patch:
    """Return a patch that gives xIELU change(its four numbers) in place of its numbers."""

    def override(op: Any, at: Any, x: Any, *configured: float) -> Any:
        """Return the activation xIELU of `x`, with change(*configured) as its four numbers."""
        return op(x, *change(*configured))

    return lambda patched, layers: patched.with_op("xielu", override, layers)


def _clamp_activation(limit: float, alpha: float) -> Patch:
    """Return a patch that gives the activation swiglu_oai this clamp and gain."""

    def override(op: Any, at: Any, gate: Any, up: Any, *configured: float) -> Any:
        """Return gpt-oss's activation of gate and up with clamp `limit` and gain `alpha`.

        The model's `configured` numbers are not used.
        """
        return op(gate, up, limit, alpha)

    return lambda patched, layers: patched.with_op("swiglu_oai", override, layers)


# --- clamps and numbers added --------------------------------------------------------------------

# What is clamped -> what the activation gives, of its operation, its input and a limit.
CLAMPS: Mapping[str, Callable[[Any, Any, float], Any]] = {
    "the activation's input is clamped at -{0:g} and {0:g}": lambda op, x, c: op(np.clip(x, -c, c)),
    "the activation's input is clamped at {0:g}": lambda op, x, c: op(np.minimum(x, c)),
    "the activation's result is clamped at {0:g}": lambda op, x, c: np.minimum(op(x), c),
}
LIMITS = (0.5, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 10.0, 20.0, 50.0)
# What is changed by a number -> what the activation gives.
NUMBERS: Mapping[str, Callable[[Any, Any, float], Any]] = {
    "{0:g} is added to the activation's input": lambda op, x, c: op(x + x.dtype.type(c)),
    "{0:g} is added to the activation's result": lambda op, x, c: op(x) + x.dtype.type(c),
    "the activation's input is multiplied by {0:g}, its result divided by it": lambda op, x, c: (
        op(x * x.dtype.type(c)) / x.dtype.type(c)
    ),
    "the activation's result is multiplied by {0:g}": lambda op, x, c: op(x) * x.dtype.type(c),
}
# What is said -> the gated product, of its operation, the gate's activation and up.
UPS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "1 is added to up": lambda op, act, up: op(act, up + 1),
    "1 is taken from up": lambda op, act, up: op(act, up - 1),
    "up is not multiplied: the gate alone goes on": lambda op, act, up: act,
    "up goes through the activation's place: the gate is left out": lambda op, act, up: up,
}


def activation_number_change(
    words: str, how: Callable[[Any, Any, float], Any], value: float
) -> Change:
    """Return the change that makes the activation how(own function, its input, value).

    `words` is the sentence about it, with {} for the number.
    """
    return Change(
        "activation",
        words.format(value),
        ("activation",),
        _shape_activation(how, value),
        {words.partition("{")[0].strip() or "added": value},
    )


def _shape_activation(how: Callable[[Any, Any, float], Any], value: float) -> Patch:
    """Return a patch that makes the activation how(own function, its input, value)."""

    def override(op: Any, at: Any, x: Any, kind: str, **kwargs: Any) -> Any:
        """Return an MLP's activation by the mistaken formula how(own function, x, value).

        After a convolution it is the model's own.
        """
        if at.point in ("delta_qkv", "ssm_conv_in"):
            return op(x, kind, **kwargs)
        return np.asarray(how(lambda y: op(y, kind, **kwargs), x, value), x.dtype)

    return lambda patched, layers: patched.with_op("activate", override, layers)


def _patch_gated_product(how: Callable[[Any, Any, Any], Any]) -> Patch:
    """Return a patch that replaces act * up by how(product, act, up)."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose MLPs in `layers` compute act * up by the mistake `how`."""
        held: list[Any] = []

        def activate(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the activation of `x`, and keep it in `held` to recognise its product."""
            y = op(x, *args, **kwargs)
            held[:] = [y]
            return y

        def mul(op: Any, at: Any, a: Any, b: Any) -> Any:
            """Return the mistaken how(op, a, b) where `a` is the MLP's activation.

            Elsewhere it returns a * b.
            """
            inside = at.point == "ffn_act" or (held and a is held[0])
            return how(op, a, b) if inside else op(a, b)

        return patched.with_op("activate", activate, layers).with_op("mul", mul, layers)

    return make


def _activate_product(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose gated MLPs in `layers` compute act(gate * up), not act(gate) * up."""
    held: list[Any] = []

    def activate(op: Any, at: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the activation of `x`; it, `x` and the function are kept in `held`."""
        y = op(x, *args, **kwargs)
        held[:] = [y, x, lambda z: op(z, *args, **kwargs)]
        return y

    def mul(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return the activation of gate times up where `a` is the activation of the gate.

        Elsewhere it returns a * b.
        """
        if not held or held[1].shape != b.shape or not (at.point == "ffn_act" or a is held[0]):
            return op(a, b)
        return held[2](op(held[1], b))

    return patched.with_op("activate", activate, layers).with_op("mul", mul, layers)


def gated_product_changes() -> Iterator[Change]:
    """Yield the changes of how a gated MLP joins its activation with up."""
    for says, gated in UPS.items():
        yield Change("activation", says, ("activation",), _patch_gated_product(gated), {"up": says})
    says = "gate is multiplied by up first: act(gate * up) stands for act(gate) * up"
    yield Change("activation", says, ("activation",), _activate_product, {"up": says})


def try_gated_products(case: Mismatch) -> Iterator[Change]:
    """Yield other forms of the gated product, where the point depends on one."""
    if case.patched.spec.block.mlp != "plain" and case.call("mul") and case.call("activate"):
        yield from gated_product_changes()


def up_clamp_change(limit: float) -> Change:
    """Return the change that clamps the up projection to -limit and limit."""
    return Change(
        "activation",
        f"up is clamped at -{limit:g} and {limit:g}",
        ("activation",),
        _patch_gated_product(lambda op, act, up: op(act, np.clip(up, -limit, limit))),
        {"up": limit},
    )


def usual_activation_numbers(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes by usual clamps, offsets and other forms of the activation or its product."""
    for words, how in CLAMPS.items():
        for limit in LIMITS:
            yield activation_number_change(words, how, limit)
    if patched.spec.block.mlp != "plain":
        yield from gated_product_changes()
        for limit in LIMITS:
            yield up_clamp_change(limit)
    for words, how in NUMBERS.items():
        if "added" in words:
            yield activation_number_change(words, how, 1.0)
    yield from _oss_activation_mistakes(patched)


def _oss_activation_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes of gpt-oss's activation that leave out or exchange one operation of it.

    Nothing for other activations, and for a model with a limit but no gain, whose limit only
    clamps.
    """
    if patched.hp["swiglu_limit"] is None or patched.hp["swiglu_alpha"] is None:
        return

    def act(x: Any, alpha: float) -> Any:
        """Return x * sigmoid(alpha * x), the function of the gate in gpt-oss's activation."""
        return x / (1 + np.exp(-alpha * x))

    rows: Mapping[str, Callable[[Any, Any, float, float], Any]] = {
        "1 is not added to up": lambda g, u, c, a: (
            act(np.minimum(g, c), a) * np.clip(u, -c, c)
        ),
        "up is not clamped": lambda g, u, c, a: act(np.minimum(g, c), a) * (u + 1),
        "gate is not clamped": lambda g, u, c, a: act(g, a) * (np.clip(u, -c, c) + 1),
        "gate is clamped from below, too": lambda g, u, c, a: (
            act(np.clip(g, -c, c), a) * (np.clip(u, -c, c) + 1)
        ),
        "gate and up are exchanged": lambda g, u, c, a: (
            act(np.minimum(u, c), a) * (np.clip(g, -c, c) + 1)
        ),
    }  # fmt: skip
    for says, how in rows.items():
        yield Change("activation", says, ("activation",), _oss_activation(how), {"swiglu": says})
    configured = float(patched.hp["swiglu_alpha"])
    for alpha in (1.0, 1.702):
        if alpha != configured:
            limit = float(patched.hp["swiglu_limit"])
            yield Change(
                "activation",
                f"the gate's gain is {alpha:g}; the model says {configured:g}",
                ("swiglu_alpha",),
                _clamp_activation(limit, alpha),
                {"swiglu_alpha": alpha},
            )


def _oss_activation(how: Callable[[Any, Any, float, float], Any]) -> Patch:
    """Return a patch that replaces gpt-oss's activation by how(gate, up, limit, alpha)."""

    def override(op: Any, at: Any, gate: Any, up: Any, limit: float, alpha: float) -> Any:
        """Return gpt-oss's activation by the mistaken formula `how`, in the gate's dtype."""
        return np.asarray(how(gate, up, limit, alpha), gate.dtype)

    return lambda patched, layers: patched.with_op("swiglu_oai", override, layers)


def solve_activation_number(case: Mismatch) -> Iterator[Change]:
    """Yield changes of a clamp or offset, solved from the activation's recorded input and result.

    Numbers are found on even rows; the whole point judges them.
    """
    # The activation's own input and result are known.
    call = case.call("activate")
    if call is not None and case.gives_point_value(call):
        theirs = case.recorded_result(call)
        assert theirs is not None
        even = np.arange(len(theirs)) % 2 == 0
        x, ours, y = (
            np.asarray(z, np.float64)[even] for z in (case.array(call.args[0]), call.result, theirs)
        )
        yield from _solve_numbers(case, x, ours, y)
    # The gated product is known: other forms of it, or a clamp of up.
    mul = case.call("mul")
    if mul is None or not case.gives_point_value(mul) or case.view.point != "ffn_mul":
        return
    theirs = case.recorded_result(mul)
    assert theirs is not None
    yield from gated_product_changes()
    act, up = (np.asarray(case.array(z), np.float64) for z in mul.args)
    large = np.abs(act) > 1e-3 * np.abs(act).max()
    limit = float(np.abs(theirs[large] / act[large]).max()) if large.any() else 0.0
    if 0 < limit < float(np.abs(up).max()):
        yield from case.rounded_change(up_clamp_change, limit)


def _solve_numbers(case: Mismatch, x: Any, ours: Any, y: Any) -> Iterator[Change]:
    """Yield changes with a number that fits: an offset, a clamp, or a factor.

    `x` is the activation's input, `ours` its result in the reference, `y` that in the trace.
    """
    same = np.abs(y - ours) <= 1e-4 * np.abs(ours).max()
    apart = float(np.median(y - ours))
    words = tuple(NUMBERS)
    if np.allclose(y - ours, apart, atol=1e-3 * max(abs(apart), 1e-30)):
        yield from case.rounded_change(_change_by_number(words[1], NUMBERS), apart)
    if not case.fitting:
        return
    if same.any() and not same.all():
        high = float(x[same].max())  # inside the limit nothing differs
        made: list[Change] = []
        for says in CLAMPS:
            other = float(x[~same].min()) if (x[~same] > 0).any() else high
            limits = [float(y.max())] if "result" in says else [float(np.abs(x[same]).max()), other]
            for limit in limits:
                if limit > 0:
                    near = [limit * (1 + 0.02 * k) for k in range(-10, 11)]
                    made += case.best_number(_change_by_number(says, CLAMPS), near)
        # A limit of the result is one of the input, too, if the function rises: the short number.
        yield from sorted(made, key=_digits)
    for at, tries in (
        (0, (-1.0, -0.5, -0.1, 0.1, 0.5, 1.0)),
        (2, (0.5, 0.8, 1.2, 1.702, 2.0)),
        (3, (0.5, 0.8, 1.2, 2.0)),
    ):
        yield from case.best_number(_change_by_number(words[at], NUMBERS), tries)


def _digits(change: Change) -> int:
    """Return how many digits the numbers of a change have, as they are printed."""
    return sum(len(f"{value:g}".strip("-0.").replace(".", "")) for value in change.values.values())


def _change_by_number(
    says: str, table: Mapping[str, Callable[[Any, Any, float], Any]]
) -> Callable[[float], Change]:
    """Return a function from a number to the change that row `says` of `table` makes with it."""
    return lambda value: activation_number_change(says, table[says], value)


HYPOTHESES = (
    Hypothesis("swapped_tensors", try_exchanged_gate_and_up, 375, "what is activated, before how"),
    Hypothesis("activation", try_activations, 380, "known functions, before solved ones"),
    Hypothesis("activation", try_gated_products, 385, "known products, before solved numbers"),
    Hypothesis("activation", try_clamps, 390, "one limit of the known function"),
    Hypothesis("activation", try_xielu_numbers, 400, "one parameter of the known function"),
    Hypothesis(
        "activation",
        solve_activation_number,
        405,
        "a number that is solved, after the known functions",
    ),
)
