"""Hypotheses about state space mixers: decays, time steps, operands, the state, the gate."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.diagnosis.hypotheses.stream import factor_change
from aprfmt.diagnosis.mismatch import Change, Layers, Mismatch, hyper_change
from aprfmt.inference.placing import mixer
from aprfmt.inference.replay.patched_model import PatchedModel

Array = NDArray[Any]
WHERE = ("ssm",)
CAUSES = ("ssm_scan", "ssm_decay", "ssm_step", "ssm_gate", "ssm_state")
FACTORS = (
    "attn_in_scale", "attn_out_scale", "key_scale", "ssm_in_scale", "ssm_out_scale",
    "ffn_gate_scale", "ffn_down_scale",
)  # fmt: skip
# The operands of `scan`, in order: x, step, rate, b, c, skip, state.
Operands = tuple[Any, ...]


def _rate(change: Callable[[Array], Array]) -> Callable[[Operands], Operands]:
    """Return what is scanned with other rates."""
    return lambda given: (*given[:2], change(given[2]), *given[3:])


def _dealt(given: Operands) -> Operands:
    """Return operands whose groups' B and C serve the heads in turn."""
    x, step, rate, b, c, skip, state = given
    heads, groups = x.shape[1], b.shape[1]
    order = np.arange(heads) % groups
    return x, step, rate, b[:, order], c[:, order], skip, state


def _first_group(given: Operands) -> Operands:
    """Return operands in which the first group's B and C serve all heads."""
    x, step, rate, b, c, skip, state = given
    return x, step, rate, b[:, :1], c[:, :1], skip, state


def _exchanged(given: Operands) -> Operands:
    x, step, rate, b, c, skip, state = given
    return x, step, rate, c, b, skip, state


def _unskipped(given: Operands) -> Operands:
    return (*given[:5], given[5] * 0, given[6])


# What is said -> cause, and the operands as the engine took them.
TAKEN: Mapping[str, tuple[str, Callable[[Operands], Operands]]] = {
    "A is not negated: states grow where they should decay": (
        "ssm_decay", _rate(lambda rate: -rate),
    ),
    "A is taken as it is stored, a logarithm without its exponential": (
        "ssm_decay", _rate(lambda rate: np.log(-rate)),
    ),
    "the exponential of A is left out: the decay is minus what is stored": (
        "ssm_decay", _rate(lambda rate: -np.log(-rate)),
    ),
    "A is exponentiated twice, as where a GGUF's is taken for a logarithm": (
        "ssm_decay", _rate(lambda rate: -np.exp(rate)),
    ),
    "no state decays": ("ssm_decay", _rate(lambda rate: rate * 0)),
    "B and C are exchanged": ("ssm_scan", _exchanged),
    "the groups' B and C serve the heads in turn, not heads in a row": ("ssm_scan", _dealt),
    "the first group's B and C serve all heads": ("ssm_scan", _first_group),
    "what skips the state (D x) is left out": ("ssm_scan", _unskipped),
}  # fmt: skip
# What is said -> cause, and the time steps of raw ones, bias, and limits.
Steps = Callable[[Any, Array, "Array | None", float, float], Array]
STEPS: Mapping[str, Steps] = {
    "time steps have no bias": lambda op, raw, bias, low, high: op(raw, None, low, high),
    "time steps have no softplus": lambda op, raw, bias, low, high: np.asarray(
        (raw if bias is None else raw + bias).clip(low, high)
    ),
    "time steps are not limited": lambda op, raw, bias, low, high: op(raw, bias, 0.0, np.inf),
    "the bias is added behind the softplus": lambda op, raw, bias, low, high: np.asarray(
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
    "the gate's norm is left out": lambda op, x, gate, weight, how: op(x, gate, None, **how),
    "the gate is left out": lambda op, x, gate, weight, how: op(
        x, np.full_like(gate, OPEN), weight, **how
    ),
    "the gate is a sigmoid, not silu": lambda op, x, gate, weight, how: op(
        x, _opening(gate), weight, **how
    ),
}
OPEN = 1.278464542761074  # silu of this is 1


def _opening(gate: Array) -> Array:
    """Return numbers whose silu is the sigmoid of these, by Newton's method."""
    wanted = 1 / (1 + np.exp(-gate.astype(np.float64)))
    z = wanted + 0.5
    for _ in range(30):
        s = 1 / (1 + np.exp(-z))
        z = z - (z * s - wanted) / (s * (1 + z * (1 - s)))
    return np.asarray(z, gate.dtype)


def scans(patched: PatchedModel) -> Iterator[Change]:
    """Yield the usual mistakes of a model's state space mixers; none of a model without them."""
    block, hp = patched.spec.block, patched.hp
    if block.recurrence not in ("mamba", "mamba2") or not any(hp["ssm_layers"]):
        return
    grouped = block.recurrence == "mamba2" and int(hp["ssm_groups"]) > 1
    for says, (cause, taken) in TAKEN.items():
        if "group" not in says or grouped:
            yield Change(cause, says, WHERE, _taken(taken), {"scan": says})
    limited = float(hp["ssm_step_low"]) > 0 or hp["ssm_step_high"] is not None
    for says, step in STEPS.items():
        if "limited" not in says or limited:
            yield Change("ssm_step", says, WHERE, _stepped(step), {"step": says})
    for says, gate in GATES.items():
        if "norm" not in says or (hp["ssm_norm"] and ("groups" not in says or grouped)):
            yield Change("ssm_gate", says, WHERE, _gated(gate), {"gate": says})
    yield Change("ssm_state", "no state is carried: every token sees itself only", WHERE,
                 _restarted_every(1), {"restarted": "every token"})  # fmt: skip


def multipliers(case: Mismatch) -> Iterator[Change]:
    """Leave out each factor of a projection (falcon_h1), or divide by it."""
    hp = case.patched.hp
    if case.patched.spec.block.multipliers == "none":
        return
    for name in FACTORS:
        told = float(hp[name])
        if told not in (0.0, 1.0):
            yield factor_change(name, 1.0, told)
            yield factor_change(name, 1 / told, told)
    listed = tuple(float(factor) for factor in hp["ssm_scales"])
    if any(factor != 1 for factor in listed):
        says = f"ssm_scales are left out; the model says {list(listed)}"
        yield hyper_change("multiplier", says, ssm_scales=(1.0,) * len(listed))


def scan(case: Mismatch) -> Iterator[Change]:
    """Try other operands of the scan, and a state that begins elsewhere."""
    block, hp = case.patched.spec.block, case.patched.hp
    if case.layer < 0 or mixer(block, hp, case.layer) not in ("mamba", "mamba2"):
        return
    yield from scans(case.patched)
    first = int(case.rows[0]) if len(case.rows) else 0
    if first > 0:
        says = f"no state is carried to token {first}: the scan begins with zeros there"
        yield Change("ssm_state", says, WHERE, _restarted(first), {"restarted": first})
    call = case.call("scan")
    if call is None:
        return
    before = _state_before(case)
    if before is not None:
        says = "the state is not reset: the scan begins with that of another sequence"
        yield Change("ssm_state", says, WHERE, _begun(before), general=True)


def _taken(taken: Callable[[Operands], Operands]) -> Any:
    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, *given: Any) -> Any:
            return op(*taken(given))

        return patched.with_op("scan", override, layers)

    return make


def _stepped(step: Steps) -> Any:
    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
            return step(op, raw, bias, low, high)

        return patched.with_op("time_step", override, layers)

    return make


def _gated(change: Gate) -> Any:
    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, x: Any, gate: Any, weight: Any, **how: Any) -> Any:
            return change(op, x, gate, weight, how)

        return patched.with_op("gated_scan", override, layers)

    return make


def _restarted_every(count: int) -> Any:
    """Return a maker: the state is set to zeros before every so many-th token."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, *given: Any) -> Any:
            return _pieces(op, given, list(range(0, len(given[0]), count)))

        return patched.with_op("scan", override, layers)

    return make


def _restarted(first: int) -> Any:
    """Return a maker: from a token on, the scan does not see the tokens before it."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, *given: Any) -> Any:
            return _pieces(op, given, [0, first])

        return patched.with_op("scan", override, layers)

    return make


def _pieces(op: Any, given: Operands, starts: list[int]) -> tuple[Array, Any]:
    """Return reads and the last state of pieces that each begin with zeros."""
    x, step, rate, b, c, skip, state = given
    reads = []
    for start, stop in zip(starts, [*starts[1:], len(x)], strict=True):
        part = slice(start, stop)
        read, state = op(x[part], step[part], rate, b[part], c[part], skip, None)
        reads.append(read)
    return np.concatenate(reads), state


def _begun(before: Array) -> Any:
    """Return a maker: the scan begins with this state."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, *given: Any) -> Any:
            return op(*given[:-1], before.astype(given[0].dtype))

        return patched.with_op("scan", override, layers)

    return make


def _state_before(case: Mismatch) -> Array | None:
    """Return the state [heads, head_dim, state] before the first token that gives the values.

    None unless the trace has the scan's result from the first token on. What a state adds to a
    token's read is the state, decayed so far, times C: a linear system for each row of the state.
    """
    call = case.call("scan")
    theirs = None if call is None else case.part(call)
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
