"""Hypotheses about a softmax that sums over the wrong keys.

It sums over single tiles, without the sinks of a model, or with sinks that a model does not have.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    change_head_fields,
)
from aprfmt.causes.forward.point_signatures import PointPair, PointSignature
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "softmax_reduction", "forward", "bug",
        "The softmax does not sum over just its keys: over tiles of 32 that were not combined, or "
        "with 1 added to the sum.",
        "Scores are equal, rows of the probabilities do not sum to 1 or are right for short rows "
        "only.",
        "A softmax over tiles of the printed size, or with the printed sum, is equal.",
    ),
)  # fmt: skip

TILES = (32, 16, 64, 8, 128)


def sum_over_keys(name: str, tile: int) -> Patch:
    """Return a patch: the softmax is row `name` of SUMS, with tiles of `tile` keys."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose softmax in `layers` divides by the sum `name` of SUMS."""

        def override(op: Any, at: Any, scores: Any, heads: Any) -> Any:
            """Return attention's probabilities, divided by the sum `name` over tiles of keys."""
            masked = np.where(heads.mask, patched.backend.to_numpy(scores), -np.inf)
            return patched.backend.array(SUMS[name](masked, tile))

        return patched.with_op("probs", override, layers, of_operands=True)

    return make


def _sum_first_tile(masked: Array, tile: int) -> Array:
    """Return exponentials of scores divided by their sum over the first tile of keys."""
    e = np.exp(masked - masked.max(axis=-1, keepdims=True))
    return _divide(e, e[..., :tile].sum(axis=-1, keepdims=True))


def _sum_last_tile(masked: Array, tile: int) -> Array:
    """Return exponentials of scores divided by their sum over the last tile of keys.

    The sum is over all keys where the last tile is masked.
    """
    e = np.exp(masked - masked.max(axis=-1, keepdims=True))
    last = (masked.shape[-1] - 1) // tile * tile
    total = e[..., last:].sum(axis=-1, keepdims=True)
    return _divide(e, np.where(total > 0, total, e.sum(axis=-1, keepdims=True)))


def _sum_whole_tiles(masked: Array, tile: int) -> Array:
    """Return exponentials of scores divided by their sum over full tiles of keys.

    A shorter last tile is left out of the sum, unless there is no other.
    """
    e = np.exp(masked - masked.max(axis=-1, keepdims=True))
    whole = masked.shape[-1] // tile * tile
    return _divide(e, e[..., : whole or None].sum(axis=-1, keepdims=True))


def _normalise_each_tile(masked: Array, tile: int) -> Array:
    """Return the softmax of scores within each tile of `tile` keys, each with sum 1."""
    parts = []
    for start in range(0, masked.shape[-1], tile):
        part = masked[..., start : start + tile]
        highest = part.max(axis=-1, keepdims=True)
        e = np.exp(part - np.where(np.isfinite(highest), highest, 0.0))
        parts.append(_divide(e, e.sum(axis=-1, keepdims=True)))
    return np.concatenate(parts, axis=-1)


def _divide(e: Array, total: Array) -> Array:
    """Return exponentials over their sums, zero where a sum is zero."""
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


SUMS: dict[str, Any] = {
    "the first tile of {} keys only": _sum_first_tile,
    "the last tile of {} keys only": _sum_last_tile,
    "whole tiles of {} keys only": _sum_whole_tiles,
    "each tile of {} keys by itself": _normalise_each_tile,
}


# What is said of the sinks -> those of a layer's heads, as the engine took them.
SINKS: dict[str, Any] = {
    "are multiplied by the factor on scores, too": lambda heads: heads.sinks * heads.scale,
    "are divided by the factor on scores": lambda heads: heads.sinks / heads.scale,
    "are zeros": lambda heads: heads.sinks * 0,
    "are those of the head before": lambda heads: np.roll(heads.sinks, 1),
    "are those of the next head": lambda heads: np.roll(heads.sinks, -1),
    "are in reverse order": lambda heads: heads.sinks[::-1].copy(),
    "are all the first head's": lambda heads: np.full_like(heads.sinks, heads.sinks[0]),
}


def try_softmax_sums(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the softmax: sums over tiles, and without the sinks."""
    if case.call("probs") is not None:
        yield from usual_softmax_mistakes(case.patched)


def usual_softmax_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes to a softmax without attention sinks, with other sinks, or over tiles."""
    where = ("softmax",)
    if not patched.spec.block.sinks:
        logits = np.zeros(int(patched.hp["n_heads"]), np.float32)
        yield Change(
            "softmax_reduction",
            "1 is added to the softmax's sum, as by a sink of logit 0, which the model does not "
            "have",
            where,
            partial(change_head_fields, sinks=logits),
            {"added": 1},
        )
    if patched.spec.block.sinks:
        yield Change(
            "softmax_reduction",
            "the softmax sums without the sinks",
            where,
            lambda patched, layers: change_head_fields(patched, layers, sinks=None),
            {"sinks": False},
        )
        for says, changed in SINKS.items():
            yield Change(
                "softmax_reduction",
                f"the attention sinks {says}",
                where,
                partial(change_head_fields, sinks=changed),
                {"sinks": says},
            )
    for tile in TILES:
        for name in SUMS if tile < len(patched.ids) else ():
            says = f"the softmax sums over {name.format(tile)}"
            yield Change(
                "softmax_reduction", says, where, sum_over_keys(name, tile), {"tile": tile}
            )


def see_other_sums(pair: PointPair) -> str:
    """Return that B's probabilities do not sum to 1 in every row; "" if they do."""
    if pair.point != "probs" or np.abs(pair.b.sum(-1) - 1).max() <= 1e-3:
        return ""
    return "rows of the probabilities do not sum to 1"


HYPOTHESES = (
    Hypothesis(
        "softmax_reduction", try_softmax_sums, 330, "the sums, once scores and mask are right"
    ),
    PointSignature("softmax_reduction", see_other_sums, 1020, "the sums, once the mask is right"),
)
