"""Hypotheses about a softmax that does not sum over all keys: over tiles, or without the sinks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.mismatch import Change, Hypothesis, Layers, Mismatch, heads_changed
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "softmax_reduction", "forward", "bug",
        "The softmax does not sum over all its keys, as over tiles of 32 that were not combined.",
        "Scores are equal, rows of the probabilities do not sum to 1 or are right for short rows "
        "only.",
        "A softmax over tiles of the printed size is equal.",
    ),
)  # fmt: skip

Array = NDArray[Any]
TILES = (32, 16, 64, 8, 128)


def sums_over(name: str, tile: int) -> Any:
    """Return a function for `Change.make`: probabilities with sums over another set of keys."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        def override(op: Any, at: Any, scores: Any, heads: Any) -> Any:
            masked = np.where(heads.mask, patched.backend.to_numpy(scores), -np.inf)
            return patched.backend.array(SUMS[name](masked, tile))

        return patched.with_op("probs", override, layers)

    return make


def _first_tile(masked: Array, tile: int) -> Array:
    e = np.exp(masked - masked.max(axis=-1, keepdims=True))
    return _divided(e, e[..., :tile].sum(axis=-1, keepdims=True))


def _last_tile(masked: Array, tile: int) -> Array:
    e = np.exp(masked - masked.max(axis=-1, keepdims=True))
    last = (masked.shape[-1] - 1) // tile * tile
    total = e[..., last:].sum(axis=-1, keepdims=True)
    return _divided(e, np.where(total > 0, total, e.sum(axis=-1, keepdims=True)))


def _whole_tiles(masked: Array, tile: int) -> Array:
    e = np.exp(masked - masked.max(axis=-1, keepdims=True))
    whole = masked.shape[-1] // tile * tile
    return _divided(e, e[..., : whole or None].sum(axis=-1, keepdims=True))


def _each_tile(masked: Array, tile: int) -> Array:
    parts = []
    for start in range(0, masked.shape[-1], tile):
        part = masked[..., start : start + tile]
        highest = part.max(axis=-1, keepdims=True)
        e = np.exp(part - np.where(np.isfinite(highest), highest, 0.0))
        parts.append(_divided(e, e.sum(axis=-1, keepdims=True)))
    return np.concatenate(parts, axis=-1)


def _divided(e: Array, total: Array) -> Array:
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


SUMS: dict[str, Any] = {
    "the first tile of {} keys only": _first_tile,
    "the last tile of {} keys only": _last_tile,
    "whole tiles of {} keys only": _whole_tiles,
    "each tile of {} keys by itself": _each_tile,
}


def softmax(case: Mismatch) -> Iterator[Change]:
    """Try sums over tiles, and without the sinks."""
    if case.call("probs") is not None:
        yield from sums(case.patched)


def sums(patched: PatchedModel) -> Iterator[Change]:
    """Yield the changes to sums without the sinks, and over tiles of the pass's tokens."""
    where = ("softmax",)
    if patched.spec.block.sinks:
        yield Change(
            "softmax_reduction",
            "the softmax sums without the sinks",
            where,
            lambda patched, layers: heads_changed(patched, layers, sinks=None),
            {"sinks": False},
        )
    for tile in TILES:
        for name in SUMS if tile < len(patched.ids) else ():
            says = f"the softmax sums over {name.format(tile)}"
            yield Change("softmax_reduction", says, where, sums_over(name, tile), {"tile": tile})


HYPOTHESES = (
    Hypothesis("softmax_reduction", softmax, 330, "the sums, once scores and mask are right"),
)
