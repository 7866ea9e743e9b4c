"""Hypotheses about rope: pairing, base, scaling, rotated part, layers, positions.

A *pair* is the two elements of a head that rope rotates together; a *pairing* says which two. A
*kind* of rope is the rotation of some of a model's layers.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.arch.rope_hf import yarn_mscale
from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    FittedNumber,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    differing_rows,
    hyper_change,
)
from aprfmt.causes.forward.operation_patches import rotate_times
from aprfmt.causes.forward.point_signatures import ALIKE, PointPair, PointSignature
from aprfmt.causes.forward.rotations import (
    explaining_rotation,
    has_rope_between_points,
    hides_rope_angles,
    other_rope_factors,
    pass_length,
    rope_frequencies,
    rope_kind_of_layer,
    rope_kinds,
    rotate_with,
    solve_rotation,
    token_positions,
    without_rope,
)
from aprfmt.causes.row import Cause
from aprfmt.errors import AprfmtError
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.rope import RopeKind, compute_frequencies, rotation_of_layer
from aprfmt.measure.distances import rel_l2
from aprfmt.tensors.norms import exact_norm

CAUSE_ROWS = (
    Cause(
        "rope_theta", "config", "bug",
        "Rope turns with another base frequency.",
        "q and k are equal before rope and differ after it, more with position, but not in the "
        "first pair; the lengths are equal.",
        "The angles of the rows give the base; rope with it is equal.",
        keys=("rope_theta", "rope_theta_local"),
    ),
    Cause(
        "rope_scaling", "config", "bug",
        "Rope scaling for long contexts is missing, or its factors are others.",
        "As rope_theta, but the angles follow no single base, or all shrink by one factor.",
        "The angles give the factor of every frequency; rope with the other rule is equal.",
        keys=("context_length", "rope_scaling"),
    ),
    Cause(
        "rope_layers", "config", "bug",
        "Layers rotate that should not, do not where they should, or use the other kind of rope "
        "(local and global layers exchanged).",
        "Some layers are equal after rope and others not.",
        "Turning rope on, off or to the other kind in the named layers makes them equal.",
        keys=("rope_scaling_layers", "rope_layers"),
        by_place=True,
    ),
    Cause(
        "partial_rotary", "config", "bug",
        "Another number of elements of each head is rotated.",
        "Elements past some index are rotated on one side and equal to the input on the other.",
        "Rope over the printed number of elements is equal.",
        keys=("rope_dim",),
    ),
    Cause(
        "positions", "forward", "bug",
        "Tokens have other positions: counted from another start, or not at all.",
        "Rope's angles, or the learned rows, belong to positions at a constant distance.",
        "The pass with the printed positions is equal.",
        keys=("position_offset", "alibi_max_bias"),
    ),
)  # fmt: skip

# Bases in use, for traces that show no angles.
THETAS = (1e2, 1e3, 1e4, 2.5e4, 5e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 8e6, 1e7)


def other_bases(kind: RopeKind) -> list[float]:
    """Return the rope bases to try in place of a kind's: usual ones, and one below its own.

    A base that is not usual is fitted from the nearest of these, above and below the kind's own.
    """
    return [theta for theta in (kind.theta / 4, *THETAS) if theta != kind.theta]


MOST_POSITIONS = 2048  # rows of a table that are tried one by one
ROW_SLACK = 4.0  # times the point's tolerance that a single row may be away
# Values of a rope scaling's numbers that published models have.
_SCALING_VALUES: Mapping[str, tuple[float, ...]] = {
    "factor": (8.0, 32.0, 4.0, 16.0, 2.0, 40.0, 64.0),
    "original_context_length": (8192, 4096, 2048, 16384, 32768),
    "low_freq_factor": (1.0,),
    "high_freq_factor": (4.0,),
    "beta_fast": (32.0,),
    "beta_slow": (1.0,),
    "attention_factor": (1.0,),
}
SIDES = {"queries": "keys", "keys": "queries"}  # what rope rotates -> the other one
_OTHER_LIST: Mapping[str, str] = {"long_factor": "short_factor", "short_factor": "long_factor"}


def try_pairings(case: Mismatch) -> Iterator[Change]:
    """Yield changes to the other rope pairing, its result in its own or in adjacent order."""
    call = case.call("rope")
    if call is None:
        return
    style = call.kwargs["style"]
    yield pairing_change(style)
    yield pairing_change(style, case.array(call.args[1][0]).shape[-1])


def pairing_change(style: str, pairs: int = 0) -> Change:
    """Return the change from pairing `style` ("half", "interleaved") to the other one.

    `pairs`: how many pairs the trace records as adjacent elements; 0 if it does not.
    """
    other = "interleaved" if style == "half" else "half"
    return Change(
        "rope_pairing",
        f"rope pairs {_pairing_words(other)}; the weights are laid out for {_pairing_words(style)}"
        + (", and the rotated vectors are recorded in that order" if pairs else ""),
        ("rope_style",),
        use_rope_style(other, pairs),
        {"rope_style": other},
    )


def try_reversed_rotation(case: Mismatch) -> Iterator[Change]:
    """Yield the change that negates rope's sine, where the point depends on rope."""
    if case.call("rope") is not None:
        yield reversed_rotation_change()


def reversed_rotation_change() -> Change:
    """Return the change that negates rope's sine, which rotates backwards."""

    def override(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return `x` rotated by the negative angles of `table`, (cos, sin)."""
        cos, sin = table
        return op(x, (cos, -sin), **kwargs)

    return Change(
        "rope_pairing",
        "rope turns backwards: the sine has the other sign",
        ("rope_style",),
        lambda patched, layers: patched.with_op("rope", override, layers),
        {"sine": -1},
    )


def _pairing_words(style: str) -> str:
    """Return which elements a rope style ("half" or "interleaved") pairs, in words."""
    return "element i with i + d/2" if style == "half" else "elements 2i with 2i + 1"


def use_rope_style(style: str, interleave: int) -> Patch:
    """Return a patch: rope pairs elements by `style`.

    The first 2 * `interleave` elements of the result are then written as adjacent pairs; 0 for
    none.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose rope in `layers` pairs the elements of a head by `style`."""

        def override(op: Any, at: Any, x: Any, table: Any, **kwargs: Any) -> Any:
            """Return `x` rotated with pairs of `style`.

            With `interleave` (pairs) the first elements are put from halves into adjacent pairs.
            """
            y = op(x, table, **kwargs | {"style": style})
            if not interleave:
                return y
            values = np.array(patched.backend.to_numpy(y))
            halves = values[..., : 2 * interleave].copy()
            values[..., 0 : 2 * interleave : 2] = halves[..., :interleave]
            values[..., 1 : 2 * interleave : 2] = halves[..., interleave:]
            return patched.backend.array(values)

        return patched.with_op("rope", override, layers)

    return make


def try_layers_with_rope(case: Mismatch) -> Iterator[Change]:
    """Yield changes that turn a layer's rope off, on, or to another kind of layer's rope.

    Each is tried first in all layers of this layer's kind, then in this layer alone.
    """
    kind, patched, hp = rope_kind_of_layer(case), case.patched, case.patched.hp
    still = kind is not None and not hp["rope_layers"][case.layer]
    if kind is None or not (
        has_rope_between_points(case) or (still and case.call("scores") is not None)
    ):
        return
    # Try all layers of this kind, then this layer alone.
    own = None if still else rotation_of_layer(hp, case.layer)
    alike = frozenset(
        layer for layer in range(patched.n_layers) if rotation_of_layer(hp, layer) == own
    )
    scopes = list(dict.fromkeys([alike, frozenset({case.layer})]))
    # The model has no rope here: turn it on.
    if still:
        for scope in scopes:
            rows = tuple(bool(x) or i in scope for i, x in enumerate(hp["rope_layers"]))
            yield _rope_change_in_layers(
                scope, "{} rotate{}; {} should not", {"rotates": True}, _use_rope_layers(rows)
            )
        return
    # The model has rope here: take the other kind's, or none.
    for other in rope_kinds(patched):
        if other != kind:
            rope = rope_frequencies(patched, other)
            scaled = " and scaling" if other.scaled else ""
            says = (
                f"{{}} rotate{{}} with base {other.theta:g}{scaled}, which belongs to the "
                "other kind of layer"
            )
            for scope in scopes:
                yield _rope_change_in_layers(
                    scope,
                    says,
                    {"rope_theta": other.theta, "scaled": other.scaled},
                    _bind_layers(rotate_with(rope.inv_freq, rope.factor), scope),
                )
    found = solve_rotation(case)
    if found is not None and not found.still:
        return
    for scope in scopes if len(alike) < patched.n_layers else scopes[-1:]:
        yield _rope_change_in_layers(
            scope,
            "{} do{} not rotate; {} should",
            {"rotates": False},
            _bind_layers(without_rope, scope),
        )


def _use_rope_layers(rotates: tuple[bool, ...]) -> Patch:
    """Return a patch that gives rope to the layers that are True in `rotates`, and to no other.

    The layers that the patch is called with are ignored.
    """
    return lambda patched, layers: patched.with_hyper(rope_layers=rotates)


def _rope_change_in_layers(
    scope: frozenset[int], says: str, values: Mapping[str, Any], make: Patch
) -> Change:
    """Return a change of rope in the layers `scope`, made by patch `make`.

    `says` is a format string with three fields: the layers' names, the verb's ending, and "it" or
    "they".
    """
    one = len(scope) == 1
    named = ", ".join(map(str, sorted(scope)))
    ending = ("es" if "do{}" in says else "s") if one else ""
    return Change(
        "rope_layers",
        says.format(f"layer{'' if one else 's'} {named}", ending, "it" if one else "they"),
        tuple(f"L{layer}.rope_layers" for layer in sorted(scope)),
        make,
        values,
        scoped=False,
    )


def _bind_layers(patch: Patch, scope: frozenset[int]) -> Patch:
    """Return the patch function bound to the layers `scope`; layers passed later are ignored."""
    return lambda patched, layers: patch(patched, scope)


def find_positions(case: Mismatch) -> Iterator[Change]:
    """Yield the change of token positions to those that the trace's rotation angles show.

    Usual mistakes are proposed where the trace does not show the angles.
    """
    kind = rope_kind_of_layer(case)
    if kind is None or not has_rope_between_points(case) or case.view.base:
        return
    ours, count = token_positions(case.patched), case.tokens
    found = explaining_rotation(case)
    if found is None:
        if hides_rope_angles(case):
            for where in usual_positions(ours):
                yield positions_change(ours, where, rotated=True)
        return
    # Take for each token the position whose angles fit best.
    inv_freq = rope_frequencies(case.patched, kind).inv_freq.astype(np.float64)
    candidates = np.arange(-count, 4 * count + 1024)
    unit = found.turn / np.maximum(np.abs(found.turn), 1e-30)
    expected = np.exp(1j * candidates[:, None] * inv_freq)
    fit = np.real(unit @ np.conj(expected).T)  # (row, candidate)
    theirs = np.array(ours)
    theirs[found.rows] = candidates[np.argmax(fit, axis=1)]
    # The fit must be good for every token.
    if fit.max(axis=1).min() < (1 - 1e-3) * len(inv_freq) or np.array_equal(theirs, ours):
        return
    if theirs.min() < 0:
        return
    yield positions_change(ours, theirs, rotated=True)


def try_positions_of_a_side(case: Mismatch) -> Iterator[Change]:
    """Yield changes that give only queries, or only keys, other positions in rope.

    The positions are one more than the model's, or they restart at the first row that differs and
    at each multiple of it, as inside the pages of a cache.
    """
    if rope_kind_of_layer(case) is None or not has_rope_between_points(case) or case.view.base:
        return
    ours = token_positions(case.patched)
    late = differing_rows(case)
    page = int(late[0]) if len(late) else 0
    for side, other in SIDES.items():
        yield Change(
            "positions",
            f"{side} are rotated one position further than {other}",
            ("positions",),
            _on_side(side, _rotate_at(ours + 1)),
            {"offset": 1, "of": side},
        )
        if page > 1:
            yield Change(
                "positions",
                f"{side} are rotated by positions that begin again at every {page}, "
                f"{other} are not",
                ("positions",),
                _on_side(side, _rotate_at(ours % page)),
                {"page": page, "of": side},
            )


def try_pairings_of_a_side(case: Mismatch) -> Iterator[Change]:
    """Yield changes of rope's pairing, direction or base for queries or keys alone.

    Another base is that of another kind of the model's layers. Each is tried with the elements of
    the rotated vectors in their own order, and in the order of the other pairing. Nothing is
    yielded if no rope was called or its angles do not show.
    """
    call = case.call("rope")
    if call is None or not hides_rope_angles(case):
        return
    style, pairs = call.kwargs["style"], case.array(call.args[1][0]).shape[-1]
    patched, own = case.patched, rope_kind_of_layer(case)
    kinds = dict.fromkeys(rotation_of_layer(patched.hp, at) for at in range(patched.n_layers))
    bases = (
        theta_of_other_layers_change(patched, kind)
        for kind in kinds
        if kind is not None and kind != own
    )
    turns = pairing_change(style), pairing_change(style, pairs), reversed_rotation_change()
    for made in (*turns, *bases):
        for side in SIDES:
            yield _change_of_side(made, side)


def try_rotations_of_a_side(case: Mismatch) -> Iterator[Change]:
    """Yield changes of rope for queries or keys alone, where the angles of the other are right.

    The point is q_rope or k_rope, and the trace has the other one. Not rotating, or rotating
    twice, comes before numbers that are solved from the angles.
    """
    sides = {"q_rope": ("queries", "k_rope"), "k_rope": ("keys", "q_rope")}
    call, (side, name) = case.call("rope"), sides.get(case.view.point, ("", ""))
    other = case.found.views.get(f"L{case.layer}.{name}")
    if call is None or hides_rope_angles(case) or other is None:
        return
    if other.residual is None or other.flagged:
        return
    yield from rotation_count_changes(side)
    for solve in (
        try_reversed_rotation,
        find_positions,
        try_pairings,
        try_rotated_counts,
        try_rotated_elements,
        find_theta,
        find_rope_scaling,
    ):
        for made in solve(case):
            yield _change_of_side(made, side)


def rotation_count_changes(*sides: str) -> Iterator[Change]:
    """Yield changes that rotate queries or keys not at all, or twice, for each of `sides`."""
    for times, says in ((0, "not rotated"), (2, "rotated twice")):
        for side in sides:
            counts = {"keys": 1, "queries": 1} | {side: times}
            yield Change(
                "rope_layers",
                f"{side} are {says}",
                ("rope_layers",),
                rotate_times(counts["keys"], counts["queries"]),
                counts,
            )


def _change_of_side(made: Change, side: str) -> Change:
    """Return a change of rope for queries or keys (`side`) alone."""
    values = {**made.values, "of": side}
    if values.get("offset") is not None:
        values.pop("positions", None)  # all of them follow from the offset
    return replace(
        made,
        says=f"of {side} alone, not of {SIDES[side]}: {made.says}",
        make=_on_side(side, made.make),
        values=values,
        scoped=True,
    )


def theta_of_other_layers_change(patched: PatchedModel, kind: RopeKind) -> Change:
    """Return the change that gives layers of a rope kind the rope of another kind of the model."""
    rope = compute_frequencies(patched.hp, kind, pass_length(patched))
    return Change(
        "rope_layers",
        f"layers rotate with base {kind.theta:g}{' and scaling' if kind.scaled else ''}, which "
        "belongs to the other kind of layer",
        ("rope_layers",),
        rotate_with(rope.inv_freq, rope.factor),
        {"rope_theta": kind.theta, "scaled": kind.scaled},
    )


def _on_side(side: str, patch: Patch) -> Patch:
    """Return a patch whose change to rotations acts on the queries alone, or on the keys.

    `side` says which: "queries" or "keys". A layer rotates its queries first, and then its keys.
    """

    def on_one(override: Any) -> Any:
        """Return an override of rope that applies `override` to queries or to keys alone."""
        calls: list[int] = []  # the layer of each rotation so far in the layer at work

        def turn(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the result of `override` for a rotation of `side`, else the usual one.

            `side` is queries or keys. `calls` counts a layer's rotations, which are of queries and
            keys in turn.
            """
            calls[:] = [*calls, at.layer] if calls[-1:] == [at.layer] else [at.layer]
            if len(calls) % 2 == (side == "queries"):
                return override(op, at, *args, **kwargs)
            return op(*args, **kwargs)

        return turn

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose rope is changed for `side` (queries or keys) alone in `layers`."""
        made, before = patch(patched, layers), patched.overrides.get("rope", ())
        if made.positions is not None and made.positions != patched.positions:
            made = _rotate_at(np.asarray(made.positions))(patched, layers)
        added = tuple(on_one(one) for one in made.overrides["rope"][len(before) :])
        return replace(made, overrides={**made.overrides, "rope": (*before, *added)})

    return make


def _rotate_at(where: Array) -> Patch:
    """Return a patch function: rope rotates each token by the position in `where` [tokens]."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose rope in `layers` rotates tokens by the positions `where`."""

        def override(op: Any, at: Any, x: Any, table: Any, *, style: Any, cast: Any) -> Any:
            """Return `x` rotated by the positions `where`, by `table` in a layer without rope."""
            kind = rotation_of_layer(patched.hp, at.layer)
            if kind is not None:
                rope = rope_frequencies(patched, kind)
                table = patched.backend.rope_table(
                    where, np.asarray(rope.inv_freq, np.float32), factor=rope.factor, cast=cast
                )
            return op(x, table, style=style, cast=cast)

        return patched.with_op("rope", override, layers)

    return make


def usual_positions(ours: Array) -> list[Array]:
    """Return wrong positions that engines give tokens: all zero, or shifted from `ours`."""
    shifts = (1, 2, 3, 4, 8, len(ours))
    return [np.zeros_like(ours), *(ours + shift for shift in shifts), np.maximum(ours - 1, 0)]


def positions_change(ours: Array, theirs: Array, *, rotated: bool = False) -> Change:
    """Return the change from positions `ours` to `theirs`, both int arrays, one for each token.

    `rotated`: rope uses them. At position 0 rope does nothing, so that a pass without rope has
    the same values as one in which every position is 0: the sentence says so.
    """
    shift = np.unique(theirs - ours)
    if len(shift) == 1:
        says = f"positions are counted from {int(theirs[0])} instead of {int(ours[0])}"
    elif rotated and not theirs.any():
        says = "rope is not applied, or every token has position 0"
    elif len(np.unique(theirs)) == 1:
        says = f"every token has position {int(theirs[0])}"
    else:
        first = int(np.flatnonzero(theirs != ours)[0])
        which = f"from token {first} on tokens have" if first else "tokens have"
        more = ", ..." if first + 6 < len(theirs) else ""
        given, right = (", ".join(map(str, at[first : first + 6])) for at in (theirs, ours))
        says = f"{which} positions {given}{more} instead of {right}{more}"
    where = tuple(int(p) for p in theirs)
    return Change(
        "positions",
        says,
        ("positions",),
        lambda patched, layers: patched.with_positions(where),
        {"positions": list(where[:64]), "offset": int(shift[0]) if len(shift) == 1 else None},
        scoped=False,
    )


def table_offset_change(configured: int, first: int) -> Change:
    """Return the change that position 0 takes row `first` of a learned table, not `configured`."""
    says = f"position 0 takes row {first} of the table; the model says row {configured}"
    return hyper_change("positions", says, position_offset=first)


def early_table_offsets(patched: PatchedModel) -> Iterator[Change]:
    """Yield the changes that position 0 takes an earlier row of a learned table, such as the first.

    Nothing for models without a learned table, and where position 0 has its first row.
    """
    configured = int(patched.hp["position_offset"])
    if patched.spec.block.position == "learned":
        for first in range(configured):
            yield table_offset_change(configured, first)


def positions_by_rows(case: Mismatch) -> Array | None:
    """Return the position of each token, int array, that gives its recorded row; or None.

    Before attention a row depends on its own token's position alone: all tokens are given one
    position after the other, and each keeps the nearest. None where attention came before the
    point, for long tables or texts, where a row fits no position, and where every token has its
    right position.
    """
    table = len(case.patched.weights["position_embd.weight"].numpy())
    first = int(case.patched.hp["position_offset"])
    count = table - first
    ours = token_positions(case.patched)
    if case.call("scores") is not None or not 0 < count <= MOST_POSITIONS:
        return None
    best: Array = np.full(len(case.rows), np.inf)
    found: Array = np.array(ours)
    for position in range(count):
        view = case.attempt(positions_change(ours, np.full_like(ours, position)))
        if view is None or view.residual is None:
            return None
        apart = case.distances_by_row(view)
        nearer = apart < best
        best = np.where(nearer, apart, best)
        found[case.rows[nearer]] = position
    if best.max() > ROW_SLACK * case.view.tolerance or np.array_equal(found, ours):
        return None
    return found


def try_rotated_counts(case: Mismatch) -> Iterator[Change]:
    """Yield the change to the first number of rotated elements that fits the trace."""
    kind = rope_kind_of_layer(case)
    if kind is None or not has_rope_between_points(case) or case.view.base:
        return
    width = int(case.patched.hp["qk_rope_head_dim"] or case.patched.hp["head_dim"])
    configured = int(case.patched.hp["rope_dim"])
    if case.patched.hp["rope_scaling"] is not None and kind.scaled:
        return  # the scaling's lists fit only the model's number of pairs
    chosen = [n for n in range(2, width + 1, 2) if n != configured]
    if hides_rope_angles(case) and len(chosen) > 8:
        chosen = [n for n in (width, 3 * width // 4, width // 2, width // 4) if n in chosen]
    for n in chosen:
        for change in (
            rotated_count_change(case.patched, kind, n),
            *_kept_frequencies_change(case.patched, kind, n),
        ):
            if case.trial(change) <= case.view.tolerance:
                yield change
                return
    yield from head_width_changes(case.patched, kind)


def rotated_count_change(patched: PatchedModel, kind: RopeKind, n: int) -> Change:
    """Return the change to `n` rotated elements of each head, for one kind of rope."""
    wanted = kind if kind.dim is None else kind._replace(dim=n)
    rope = compute_frequencies(patched.hp.with_values(rope_dim=n), wanted, pass_length(patched))
    configured = int(patched.hp["rope_dim"])
    return Change(
        "partial_rotary",
        f"{n} elements of each head are rotated; the model says {configured}",
        ("rope_dim",),
        rotate_with(rope.inv_freq, rope.factor),
        {"rope_dim": n},
    )


def _kept_frequencies_change(patched: PatchedModel, kind: RopeKind, n: int) -> Iterator[Change]:
    """Yield the change to `n` rotated elements by the first n / 2 of the model's frequencies.

    It is what an engine does that reads only half of the cosines of a partial rotation. Nothing if
    the model rotates no more than `n`.
    """
    configured = int(patched.hp["rope_dim"])
    if n >= configured:
        return
    rope = rope_frequencies(patched, kind)
    yield Change(
        "partial_rotary",
        f"{n} elements of each head are rotated, by the first {n // 2} frequencies of "
        f"{configured // 2}; the model says {configured}",
        ("rope_dim",),
        rotate_with(rope.inv_freq[: n // 2], rope.factor),
        {"rope_dim": n},
    )


def head_width_changes(patched: PatchedModel, kind: RopeKind) -> Iterator[Change]:
    """Yield changes to a partial rotation with the frequencies of a rotation of the whole head.

    Pair i turns by theta ** (-2i / head_dim), where the model divides by the number of rotated
    elements. The pairs are the model's, or those of a whole head: i with i + head_dim / 2.
    """
    n, width = int(patched.hp["rope_dim"]), int(patched.hp["head_dim"])
    if patched.spec.block.attention != "gqa" or not 0 < n < width or kind.scaled:
        return
    wanted = kind if kind.dim is None else kind._replace(dim=width)
    rope = compute_frequencies(patched.hp.with_values(rope_dim=width), wanted, pass_length(patched))
    own = np.asarray(rope.inv_freq, np.float64)[: n // 2]
    spread = np.concatenate([own, np.zeros(width // 2 - n // 2)])
    for frequencies, pairs in ((own, ""), (spread, ", and the pairs too")):
        yield Change(
            "partial_rotary",
            f"the {n // 2} frequencies of the rotated pairs are those of a whole head of {width}"
            f"{pairs}; the model says {n} rotated elements, and frequencies of these",
            ("rope_dim",),
            rotate_with(frequencies, rope.factor),
            {"frequencies": own.tolist()},
        )


def rotated_element_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes that rotate other elements of a head, for a model that rotates only some."""
    n, width = int(patched.hp["rope_dim"]), int(patched.hp["head_dim"])
    if patched.spec.block.attention != "gqa" or not 0 < n < width:
        return
    half = n // 2
    spread = np.concatenate([np.arange(half), width // 2 + np.arange(half)])
    for says, at in (
        (f"the last {n} elements of each head are rotated", np.arange(width - n, width)),
        (f"the first {half} elements of each half of a head are rotated", spread),
        (f"every second element of each head is rotated, {n} of them", np.arange(n) * 2 % width),
    ):
        if len(set(at.tolist())) == n:
            yield Change(
                "partial_rotary",
                f"{says}; the model says the first {n}",
                ("rope_dim",),
                _rotate_elements(at),
                {"elements": at.tolist()},
            )


def _rotate_elements(at: Array) -> Patch:
    """Return a patch: rope rotates only the elements `at` (int array) of a head.

    Heads that are too narrow for that, such as an indexer's, are rotated as before.
    """

    def override(op: Any, at_: Any, x: Any, table: Any, **kwargs: Any) -> Any:
        """Return `x` with only the elements `at` of each head rotated.

        Heads too narrow for these are rotated as usual.
        """
        if x.shape[-1] <= int(at.max()):
            return op(x, table, **kwargs)
        y = np.array(x)
        y[..., at] = op(np.ascontiguousarray(x[..., at]), table, **kwargs)
        return y

    return lambda patched, layers: patched.with_op("rope", override, layers)


def try_rotated_elements(case: Mismatch) -> Iterator[Change]:
    """Yield changes that rotate other elements of a head, if the point shows a rotation."""
    if case.layer >= 0 and has_rope_between_points(case):
        yield from rotated_element_changes(case.patched)


def theta_change(patched: PatchedModel, kind: RopeKind, theta: float) -> Change:
    """Return the change that gives rope of one `kind` the base `theta`."""
    local = kind.theta != patched.hp["rope_theta"]
    name = "rope_theta_local" if local else "rope_theta"
    rope = compute_frequencies(
        patched.hp.with_values(rope_theta=theta), kind._replace(theta=theta), pass_length(patched)
    )
    return Change(
        "rope_theta",
        f"rope's base is {theta:g}; the model says {kind.theta:g}",
        (name,),
        rotate_with(rope.inv_freq, rope.factor),
        {name: theta},
    )


def find_theta(case: Mismatch) -> Iterator[Change]:
    """Yield the change of rope's base to the one that fits the trace's rotation frequencies.

    Usual bases are tried where the trace does not show the angles.
    """
    kind = rope_kind_of_layer(case)
    if kind is None or not has_rope_between_points(case) or case.view.base:
        return
    found = explaining_rotation(case)
    if found is None:
        if hides_rope_angles(case):
            yield from case.best_number(
                lambda t: theta_change(case.patched, kind, t), other_bases(kind)
            )
        return
    if found.still or len(found.rows) < 2:
        return
    # Fit one base to the logarithms of the frequencies.
    configured = rope_frequencies(case.patched, kind).inv_freq.astype(np.float64)
    seen = found.frequencies
    plain = compute_frequencies(
        case.patched.hp, kind._replace(scaled=False), pass_length(case.patched)
    ).inv_freq
    # Divide by the scaling's factor of each pair, which leaves the base.
    factors = configured / plain.astype(np.float64)
    bare = seen / factors
    index = np.arange(len(bare))
    use = (index > 0) & (bare > 0)
    if not use.any() or abs(bare[0] - 1) > 0.01:
        return
    weights = bare[use] ** 2 * index[use]  # the angle of a slow pair is less exact
    slopes = -np.log(bare[use]) / index[use]
    slope = float(np.sum(weights * slopes) / np.sum(weights))
    value = math.exp(slope * len(bare))
    if not 1 < value < 1e12 or math.isclose(value, kind.theta, rel_tol=1e-4):
        return
    yield from case.rounded_change(lambda t: theta_change(case.patched, kind, t), value)


def without_scaling_changes(patched: PatchedModel, kind: RopeKind) -> Iterator[Change]:
    """Yield the changes that leave out rope scaling, or use a wrong attention factor of it.

    That factor is on cos and sin. Nothing if this `kind` of rope has no scaling.
    """
    if not kind.scaled:
        return
    length, configured = pass_length(patched), patched.hp["rope_scaling"]
    own, plain = (
        compute_frequencies(patched.hp, kind, length),
        compute_frequencies(patched.hp, kind._replace(scaled=False), length),
    )
    yield Change(
        "rope_scaling",
        f"the scaling {configured['type']} is left out",
        ("rope_scaling",),
        rotate_with(plain.inv_freq, 1.0),
        {"rope_scaling": None},
    )
    for factor, how in other_rope_factors(patched, kind):
        yield Change(
            "rope_scaling",
            f"the scaling's factor {own.factor:.6g} on cos and sin {how}",
            ("rope_scaling.attention_factor",),
            rotate_with(own.inv_freq, factor),
            {"attention_factor": factor},
        )


def scaling_value_changes(patched: PatchedModel, kind: RopeKind) -> Iterator[Change]:
    """Yield changes of one number of the model's rope scaling to another usual value.

    `kind` is the kind of rope; nothing if it has no scaling. A list of divisors may be replaced
    by the one for the other length.
    """
    if not kind.scaled:
        return
    configured = patched.hp["rope_scaling"]
    for key, value in configured.items():
        if key in _OTHER_LIST:
            other = configured.get(_OTHER_LIST[key])
            wanted = [] if other is None else [(other, f"the list {_OTHER_LIST[key]} for {key}")]
        elif isinstance(value, bool):
            wanted = [(not value, f"{key} {str(not value).lower()}")]
        elif isinstance(value, int | float):
            usual = (*_SCALING_VALUES.get(key, ()), 2 * value, value / 2, 4 * value, value / 4)
            wanted = [(type(value)(each), f"{key} {each:g}") for each in dict.fromkeys(usual)]
        else:
            continue
        for each, says in wanted:
            change = scaling_change(patched, kind, key, each, says) if each != value else None
            if change is not None:
                yield change


def scaling_change(
    patched: PatchedModel, kind: RopeKind, key: str, value: Any, says: str
) -> Change | None:
    """Return the change that sets `key` of the rope scaling to `value`.

    None if that gives no frequencies, or the model's own. `says` is the value in words. With
    another YaRN `factor`, an `attention_factor` that was computed from the model's factor is
    computed again.
    """
    configured = patched.hp["rope_scaling"]
    made = dict(configured) | {key: value}
    if key == "factor" and "attention_factor" in configured:
        own, other = yarn_mscale(configured[key]), yarn_mscale(value)
        if math.isclose(configured["attention_factor"], own, rel_tol=1e-6):
            made["attention_factor"] = other
    try:
        rope = compute_frequencies(
            patched.hp.with_values(rope_scaling=made), kind, pass_length(patched)
        )
    except (AprfmtError, ArithmeticError, ValueError):
        return None
    if not np.isfinite(rope.inv_freq).all() or rope.equals(rope_frequencies(patched, kind)):
        return None
    own_value, numbers = configured[key], isinstance(configured[key], int | float)
    model = (
        f"; the model says {str(own_value).lower()}"
        if isinstance(own_value, bool)
        else (f"; the model says {own_value:g}" if numbers else "")
    )
    return Change(
        "rope_scaling",
        f"the scaling {configured['type']} has {says}{model}",
        (f"rope_scaling.{key}",),
        rotate_with(rope.inv_freq, rope.factor),
        {"rope_scaling": made},
    )


def position_divisor_change(patched: PatchedModel, kind: RopeKind, factor: float) -> Change:
    """Return the change that divides positions by `factor`, in place of the model's own scaling."""
    plain = compute_frequencies(patched.hp, kind._replace(scaled=False), pass_length(patched))
    model = (
        f"; the model says {_scaling_text(patched.hp['rope_scaling'])}"
        if kind.scaled
        else (", which the model does not say")
    )
    how = f"divided by {factor:g}" if factor >= 1 else f"multiplied by {1 / factor:g}"
    return Change(
        "rope_scaling",
        f"positions are {how}{model}",
        ("rope_scaling",),
        rotate_with(plain.inv_freq / np.float32(factor), 1.0),
        {"rope_scaling": {"type": "linear", "factor": factor}},
    )


def usual_divisors(patched: PatchedModel, kind: RopeKind) -> tuple[float, ...]:
    """Return the numbers by which engines divide positions by mistake, usual ones first.

    The inverse and the square of the model's own factor are among them.
    """
    found = dict.fromkeys((2.0, 4.0, 8.0, 16.0, 32.0))
    factor = (patched.hp["rope_scaling"] or {}).get("factor") if kind.scaled else None
    if isinstance(factor, int | float) and factor not in (0, 1):
        found |= dict.fromkeys((1 / float(factor), float(factor) ** 2))
    return tuple(found)


def find_rope_scaling(case: Mismatch) -> Iterator[Change]:
    """Yield changes of rope scaling: none, positions divided by a factor, or solved frequencies.

    Usual factors are tried where the trace does not show the angles.
    """
    kind = rope_kind_of_layer(case)
    if kind is None or not has_rope_between_points(case) or case.view.base:
        return
    yield from without_scaling_changes(case.patched, kind)
    yield from scaling_value_changes(case.patched, kind)
    found = explaining_rotation(case)

    def divide_positions(factor: float) -> Change:
        """Return the change that divides the positions in rope's angles by `factor`."""
        return position_divisor_change(case.patched, kind, factor)

    if found is None:
        if hides_rope_angles(case):
            tried = (3.0, *usual_divisors(case.patched, kind))
            yield from case.best_number(divide_positions, tried)
        return
    if found.still or len(found.rows) < 2:
        return
    # One factor of all fast pairs, then a factor for each pair.
    seen, configured = found.frequencies, case.patched.hp["rope_scaling"]
    plain = compute_frequencies(
        case.patched.hp, kind._replace(scaled=False), pass_length(case.patched)
    )
    ratio = plain.inv_freq.astype(np.float64) / np.where(seen > 0, seen, np.nan)
    fast = ratio[: max(1, len(ratio) // 2)]
    if np.isfinite(fast).all() and np.ptp(fast) <= 0.02 * np.median(fast):
        yield from case.rounded_change(divide_positions, float(fast[0]))
    yield Change(
        "rope_scaling",
        f"the pairs turn by {_list_values(ratio)} times less than the base alone says"
        + (f", vectors grow by {found.length:.6g}" if abs(found.length - 1) > 1e-3 else "")
        + (
            f"; the model says {_scaling_text(configured)}"
            if kind.scaled
            else "; the model has no scaling"
        ),
        ("rope_scaling",),
        rotate_with(seen, found.length),
        {"factors": [float(f"{value:.6g}") for value in ratio], "attention_factor": found.length},
        general=True,
    )


def _scaling_text(scaling: Mapping[str, Any] | None) -> str:
    """Return a rope scaling's type and factor in words, "none" for None."""
    if scaling is None:
        return "none"
    factor = scaling.get("factor")
    return f"{scaling['type']}" + (f" {factor:g}" if isinstance(factor, (int, float)) else "")


def _list_values(values: Array) -> str:
    """Return at most 8 numbers as text, with "..." if there are more."""
    return join_first([f"{value:.4g}" for value in values], 8)


def find_position_rows(case: Mismatch) -> Iterator[Change]:
    """Yield the change of which rows of a learned position table were read, as the trace shows.

    Usual wrong positions, and none, are proposed where the trace does not have the sum.
    """
    if case.patched.spec.block.position != "learned" or case.layer > 0:
        return
    adds = [call for call in case.calls("add") if call.location.point == "embd"]
    if not adds:
        return
    added = adds[-1]  # after the token types
    # Without the sum itself, the position of each token is found by its row; else usual mistakes.
    if not case.gives_point_value(added):
        ours = token_positions(case.patched)
        solved = positions_by_rows(case)
        for where in usual_positions(ours) if solved is None else [solved]:
            yield positions_change(ours, where)
        if solved is None:
            yield _no_positions_change(case.patched)
            yield from early_table_offsets(case.patched)
        return
    # The rows that were added: none, or the nearest of the table.
    rows = case.view.theirs - case.array(added.args[0])
    table = np.asarray(case.patched.weights["position_embd.weight"].numpy(), np.float64)
    ours = token_positions(case.patched)
    if exact_norm(rows) <= case.view.tolerance * exact_norm(case.view.theirs):
        yield _no_positions_change(case.patched)
        return
    nearest = [int(np.argmin(np.linalg.norm(table - row, axis=1))) for row in rows]
    configured = int(case.patched.hp["position_offset"])
    theirs = np.asarray(nearest, np.int64) - configured
    if not case.agree(table[theirs + configured], rows) or np.array_equal(theirs, ours):
        return
    # Say the rows as positions, or as another offset of the table.
    if theirs.min() >= 0:
        yield positions_change(ours, theirs)
    elif len(np.unique(theirs - ours)) == 1:
        yield table_offset_change(configured, int(theirs[0] - ours[0]) + configured)


def _no_positions_change(patched: PatchedModel) -> Change:
    """Return the change that no row of the table of positions is added to the embedding."""
    table = np.asarray(patched.weights["position_embd.weight"].numpy(), np.float64)
    return Change(
        "positions",
        "no position is added to the embedding",
        ("position_embd.weight",),
        lambda made, layers: made.with_weights({"position_embd.weight": 0 * table}),
        scoped=False,
    )


def see_other_angles(pair: PointPair) -> str:
    """Return that rotated vectors have equal lengths, so other angles alone; "" if not."""
    lengths = (np.linalg.norm(value, axis=-1) for value in (pair.b, pair.a))
    if not pair.point.endswith("_rope") or rel_l2(*lengths) >= ALIKE:
        return ""
    return "the rotated vectors have equal lengths and other angles"


HYPOTHESES = (
    Hypothesis("rope_layers", try_layers_with_rope, 200, "rope at all, before its numbers"),
    Hypothesis(
        "rope_pairing", try_reversed_rotation, 210, "the other direction, before other pairs"
    ),
    Hypothesis("positions", find_positions, 220, "one shift of all angles"),
    Hypothesis("positions", try_positions_of_a_side, 225, "the same of one side alone"),
    Hypothesis("positions", find_position_rows, 230, "rows of a learned table"),
    Hypothesis("rope_pairing", try_pairings, 240, "which elements turn, before how far"),
    Hypothesis("rope_pairing", try_pairings_of_a_side, 247, "the same of one side alone"),
    Hypothesis(
        "rope_layers", try_rotations_of_a_side, 248, "of one side, where the other is right"
    ),
    Hypothesis("partial_rotary", try_rotated_counts, 250, "how many elements turn, before how far"),
    Hypothesis("rope_theta", find_theta, 260, "one base gives all frequencies"),
    Hypothesis(
        "rope_scaling", find_rope_scaling, 270, "a frequency for each pair fits more than a base"
    ),
    Hypothesis("partial_rotary", try_rotated_elements, 255, "which elements turn, after how many"),
    PointSignature("rope_theta", see_other_angles, 1030, "lengths that no factor leaves equal"),
    FittedNumber("rope_theta", theta_change, 2000, "what is turned, before scores", by_rope=True),
    FittedNumber(
        "rope_scaling",
        position_divisor_change,
        2010,
        "all angles by one number, after a base",
        by_rope=True,
    ),
)
