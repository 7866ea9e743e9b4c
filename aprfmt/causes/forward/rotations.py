"""The rotations that rope applies to q and k: the reference's, and those solved from a trace.

A *pair* is the two elements of a head that rope rotates together.

If a trace holds q or k before and after rope, every pair of elements is a complex number that was
rotated by an angle: the angles give positions and frequencies, and these give the cause. Otherwise
common values are tried on the next point in the trace.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.arch.rope_hf import longrope_attention_factor, yarn_mscale
from aprfmt.causes.forward.mismatch import Array, Layers, Mismatch, Patch
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.rope import RopeFrequencies, RopeKind, compute_frequencies, rotation_of_layer
from aprfmt.tensors.norms import exact_norm

# --- the reference's rotation --------------------------------------------------------------------


def pass_length(patched: PatchedModel) -> int:
    """Return the number of positions in the pass: the last position plus 1."""
    return max(len(patched.ids), max(patched.positions or (0,)) + 1)


def rope_kinds(patched: PatchedModel) -> list[RopeKind]:
    """Return the different kinds of rope in the model's layers, in the order of layers."""
    found = [rotation_of_layer(patched.hp, layer) for layer in range(patched.n_layers)]
    return list(dict.fromkeys([kind for kind in found if kind is not None]))


def rope_kind_of_layer(case: Mismatch) -> RopeKind | None:
    """Return the kind of rope of the differing layer; if it has none, the model's first kind.

    None for a model without rope, or a point outside the layers.
    """
    if case.patched.spec.block.position != "rope" or case.layer < 0:
        return None
    kind = rotation_of_layer(case.patched.hp, case.layer)
    every = rope_kinds(case.patched)
    return kind if kind is not None else every[0] if every else None


def rope_frequencies(patched: PatchedModel, kind: RopeKind) -> RopeFrequencies:
    """Return the frequencies and factor of a rope kind for the length of the pass."""
    return compute_frequencies(patched.hp, kind, pass_length(patched))


def other_rope_factors(patched: PatchedModel, kind: RopeKind) -> list[tuple[float, str]]:
    """Return (wrong factor on cos and sin, mistake in words) of a kind of rope with scaling.

    The mistakes are: the model's attention factor is left out, applied twice, replaced by the one
    that YaRN's or longrope's formula gives, or multiplied by it. YaRN's is of one, of `mscale` or
    of `mscale_all_dim`; the model's may be a ratio of the last two. Factors equal to the right one
    are left out. [] for a kind of rope without scaling.
    """
    scaling = patched.hp["rope_scaling"] if kind.scaled else None
    if not scaling:
        return []
    own, formulas = rope_frequencies(patched, kind).factor, [1.0]
    if scaling["type"] == "yarn":
        scales = (1.0, scaling.get("mscale"), scaling.get("mscale_all_dim"))
        formulas = [yarn_mscale(scaling["factor"], scale) for scale in scales if scale]
    elif scaling["type"] == "longrope":
        original = scaling["original_context_length"]
        formulas = [longrope_attention_factor(patched.hp["context_length"] / original, original)]
    found = [(1.0, "is left out"), (own**2, "is applied twice")]
    for formula in formulas:
        found += [
            (formula, f"is the formula's, {formula:.6g}"),
            (own * formula, f"is applied in addition to the formula's, {formula:.6g}"),
        ]
    first: list[tuple[float, str]] = []
    for factor, how in found:
        if not any(math.isclose(factor, other, rel_tol=1e-6) for other in (own, *dict(first))):
            first.append((factor, how))
    return first


def token_positions(patched: PatchedModel) -> Array:
    """Return the positions of the pass's tokens, an int array."""
    given = patched.positions
    return np.arange(len(patched.ids)) if given is None else np.asarray(given, np.int64)


def rotate_with(inv_freq: Array, factor: float) -> Patch:
    """Return a patch: rope turns by inverse frequencies `inv_freq` [pairs].

    `factor` multiplies cos and sin.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose rope in `layers` has the frequencies `inv_freq` [pairs].

        Cos and sin are multiplied by `factor`.
        """
        where = token_positions(patched)

        def override(op: Any, at: Any, x: Any, table: Any, *, style: Any, cast: Any) -> Any:
            """Return `x` rotated by the frequencies `inv_freq`; the model's `table` is not used."""
            other = patched.backend.rope_table(
                where, np.asarray(inv_freq, np.float32), factor=factor, cast=cast
            )
            return op(x, other, style=style, cast=cast)

        return patched.with_op("rope", override, layers)

    return make


def without_rope(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the patched model without rope in `layers`."""

    def override(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return `x` as rope gives it with angles of zero: unrotated."""
        cos, sin = table
        still = (
            patched.backend.array(np.ones_like(patched.backend.to_numpy(cos))),
            patched.backend.array(np.zeros_like(patched.backend.to_numpy(sin))),
        )
        return op(x, still, **kwargs)

    return patched.with_op("rope", override, layers)


# --- the angles ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rotation:
    """The rotation of q or k that a trace shows.

    `turn` [rows, pairs] is a complex factor, with length and angle, for each token and pair.
    `rows` are the tokens' numbers.
    """

    turn: Array
    rows: Array  # token of each row of `turn`
    explained: float  # relative distance of the turned input from the trace's value
    still: bool  # True if nothing was rotated

    @property
    def frequencies(self) -> Array:
        """Angle per position of each pair, in radians, [pairs].

        It is measured over growing distances of tokens. All zero if the rows are not consecutive
        tokens.
        """
        unit = self.turn / np.maximum(np.abs(self.turn), 1e-30)
        found = np.zeros(unit.shape[1])
        span = 1
        while span < len(unit):
            if not np.array_equal(np.diff(self.rows), np.ones(len(self.rows) - 1, np.int64)):
                break
            measured = np.angle(np.sum(unit[span:] * np.conj(unit[:-span]), axis=0))
            found += _wrap_angle(measured - span * found) / span
            span *= 2
        return found

    @property
    def length(self) -> float:
        """Factor that the rotation puts on the vectors' lengths; 1 if it only turns them."""
        return float(np.median(np.abs(self.turn)))


def _wrap_angle(angle: Array) -> Array:
    """Return angles, in radians, wrapped to [-pi, pi)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def solve_rotation(case: Mismatch) -> Rotation | None:
    """Return the rotation of q or k that the trace shows; None without input and output."""
    call = case.call("rope")
    if call is None:
        return _rotation_of_alias(case)
    theirs = case.recorded_result(call)
    if theirs is None:
        return None
    pairs = case.array(call.args[1][0]).shape[-1]
    return _fit_pair_rotations(case, case.array(call.args[0]), theirs, pairs, call.kwargs["style"])


def _rotation_of_alias(case: Mismatch) -> Rotation | None:
    """Return the trace's rotation in a layer where the reference has no rope; None for others.

    The point is q or k after rope, which the reference takes from the point before it.
    """
    if case.view.point not in ("q_rope", "k_rope") or not case.view.base:
        return None
    kind = rope_kind_of_layer(case)
    if kind is None:
        return None
    pairs = len(rope_frequencies(case.patched, kind).inv_freq)
    return _fit_pair_rotations(
        case, case.view.mine, case.view.theirs, pairs, str(case.patched.hp["rope_style"])
    )


def _fit_pair_rotations(case: Mismatch, x: Array, y: Array, pairs: int, style: str) -> Rotation:
    """Return the rotation that turns `x` into `y`, a complex factor for each row and pair.

    Both are [rows, heads, d]; the fit is by least squares over the heads. `style` pairs the
    elements of `x`; those of `y` are paired in halves.
    """
    rows = case.rows
    x, y = x[rows].astype(np.float64), y[rows].astype(np.float64)
    before, after = complex_pairs(x, pairs, style), complex_pairs(y, pairs, "half")
    power = np.sum(np.abs(before) ** 2, axis=1)
    turn = np.sum(after * np.conj(before), axis=1) / np.maximum(power, 1e-300)
    missed = exact_norm(after - turn[:, None] * before)
    size = max(exact_norm(after), 1e-300)
    still = exact_norm(turn - 1) / math.sqrt(turn.size) <= 10 * case.view.tolerance
    return Rotation(turn, rows, missed / size, bool(still))


def complex_pairs(x: Array, pairs: int, style: str) -> Array:
    """Return the rotated elements of x [rows, heads, d] as complex [rows, heads, pairs].

    `style` "half" pairs element i with i + pairs; any other pairs 2i with 2i + 1.
    """
    if style == "half":
        return np.asarray(x[..., :pairs] + 1j * x[..., pairs : 2 * pairs])
    return np.asarray(x[..., 0 : 2 * pairs : 2] + 1j * x[..., 1 : 2 * pairs : 2])


def explaining_rotation(case: Mismatch) -> Rotation | None:
    """Return the rotation solved from the trace; None if it does not explain the values."""
    found = solve_rotation(case)
    return found if found is not None and found.explained <= 10 * case.view.tolerance else None


def has_rope_between_points(case: Mismatch) -> bool:
    """Return whether reference or trace applies rope after the last recorded point before this."""
    return case.call("rope") is not None or (
        case.view.point in ("q_rope", "k_rope") and bool(case.view.base)
    )


def hides_rope_angles(case: Mismatch) -> bool:
    """Return whether rope comes before the point but its result is not recorded."""
    call = case.call("rope")
    return call is not None and case.recorded_result(call) is None
