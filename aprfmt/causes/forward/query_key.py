"""Hypotheses about q and k around rope: their norms, and factors that grow with position."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Change, Hypothesis, Mismatch
from aprfmt.causes.forward.norm_changes import NORMS, norm_of_rotated
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "qk_norm", "forward", "bug",
        "q and k are not normalised, or after rope instead of before, or over all heads together "
        "instead of each one.",
        "q and k are equal before their norm, and scores differ.",
        "The pass with the norms of q and k as named is equal.",
    ),
)  # fmt: skip

# Points from q on where a norm or a factor of q or k may first show.
_LATE = (
    "q_rope",
    "k_rope",
    "q_attn",
    "k_attn",
    "k_cache",
    "scores",
    "probs",
    "attn",
    "attn_out",
    "mid",
    "out",
)
PLACES: Mapping[str, tuple[str, str]] = {
    "rotated": ("after_rope", "q and k are normalised in all layers; the model says in those that "
                "rotate"),
    "after_rope": ("before_rope", "q and k are normalised before rope; the model says after it"),
}  # fmt: skip


def try_query_key_norms(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the norms of q and k after rope: left out, before rope, or in more layers.

    The last is for a model with these norms only in layers that have rope. Nothing for models
    with other norms of q and k, or without.
    """
    block = case.patched.spec.block
    late = block.qk_norm_place in PLACES and case.view.point in _LATE
    if not case.patched.hp["qk_norm"] or not late or case.layer < 0:
        return
    yield Change(
        "qk_norm",
        "q and k are not normalised",
        ("qk_norm",),
        lambda patched, layers: patched.with_hyper(layers, qk_norm=False),
        {"qk_norm": False},
    )
    other, says = PLACES[block.qk_norm_place]
    yield Change(
        "qk_norm",
        says,
        ("qk_norm",),
        lambda patched, layers: patched.with_block(layers, qk_norm_place=other),
        {"qk_norm_place": other},
    )


def try_norms_of_rotated(case: Mismatch) -> Iterator[Change]:
    """Yield changes that rotate q and k before their norms, for a point that such a norm gives.

    Only for models that normalise first. Each is tried with q_rope and k_rope recorded after the
    norm and before it, and for q or k alone.
    """
    patched = case.patched
    plain = patched.spec.block.qk_norm_place == "before_rope" and patched.hp["rope_style"] == "half"
    if case.view.point not in ("q_norm", "k_norm") or not plain or case.layer < 0:
        return
    if not patched.hp["rope_layers"][case.layer] or not case.gives_point_value(case.call(*NORMS)):
        return
    for parts, what in (("qk", "q and k are"), ("q", "q is"), ("k", "k is")):
        for before in (False, True):
            yield Change(
                "qk_norm",
                f"{what} normalised after rope instead of before",
                ("qk_norm",),
                norm_of_rotated(parts, before=before),
                {"after_rope": parts},
            )


def find_query_temperature(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the factor on queries that grows with position: left out, or another one."""
    hp = case.patched.hp
    if hp["temperature_scale"] is None or case.layer < 0 or case.view.point not in _LATE:
        return
    if case.view.point.endswith("_rope") or case.patched.points[f"L{case.layer}.q_attn"].alias_of:
        return
    yield Change(
        "attention_scale",
        "queries have no factor that grows with the position",
        ("temperature_scale",),
        lambda patched, layers: patched.with_hyper(layers, temperature_scale=0.0),
        {"temperature_scale": None},
    )
    if case.view.point == "q_attn":
        yield from _solve_temperature(case)


def _solve_temperature(case: Mismatch) -> Iterator[Change]:
    """Yield the change of the length and scale by which queries grow, solved from recorded rows.

    The first row whose factor is above 1 shows the length.
    """
    patched = case.patched
    counted = 1 if patched.spec.block.temperature == "unrotated" else 0
    own = _temperature_factors(patched, counted)
    mine, theirs = (
        np.asarray(x, np.float64).reshape(case.tokens, -1)
        for x in (case.view.mine, case.view.theirs)
    )
    ratio = np.sum(mine * theirs, axis=1) / np.maximum(np.sum(mine * mine, axis=1), 1e-300)
    grown = own * ratio - 1
    above = np.flatnonzero(grown > 10 * case.view.tolerance)
    if not len(above) or above[0] + counted < 1:
        return
    length = int(above[0]) + counted
    scale = float(grown[above[0]] / np.log(2.0))
    yield from case.rounded_change(lambda value: _temperature_change(patched, length, value), scale)


def _temperature_factors(patched: PatchedModel, counted: int) -> Any:
    """Return the factors [tokens] on the queries of a pass; `counted` is the first position."""
    length, scale = int(patched.hp["temperature_length"]), float(patched.hp["temperature_scale"])
    places = np.arange(len(patched.ids)) + counted
    return 1 + np.log1p(places // length) * scale


def _temperature_change(patched: PatchedModel, length: int, scale: float) -> Change:
    """Return the change of the factor on queries that grows with position.

    It is 1 plus `scale` times a logarithm of the position over `length`.
    """
    configured = patched.hp["temperature_length"], patched.hp["temperature_scale"]
    values = {"temperature_length": length, "temperature_scale": scale}
    return Change(
        "attention_scale",
        f"queries grow by {scale:g} times a logarithm of the position over {length}; the model "
        f"says {configured[1]:g} and {configured[0]}",
        tuple(name for name, old in zip(values, configured, strict=True) if values[name] != old),
        lambda patched, layers: patched.with_hyper(layers, **values),
        values,
    )


HYPOTHESES = (
    Hypothesis("qk_norm", try_norms_of_rotated, 53, "what a norm reads, before another kind of it"),
    Hypothesis("qk_norm", try_query_key_norms, 170, "between the product and rope"),
    Hypothesis(
        "attention_scale", find_query_temperature, 180, "a factor by position, before angles"
    ),
)
