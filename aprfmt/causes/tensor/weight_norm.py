"""Weight norm that one file has multiplied out, or whose lengths were lost.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A layer with weight norm is stored as lengths g and directions v; its weight is g * v / |v|. A
vocoder's weight norm is removed for inference: then the file has that weight. A converter that
takes v for the weight loses g.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.model.weight_norm import normed_weights
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "weight_norm_folded", "tensor", "same",
        "One file stores a weight, the other its lengths and directions (weight norm): the weight "
        "is equal.",
        "One file alone has weight_g and weight_v, the other the weight of that module.",
        "The lengths times the directions of length one are the weight.",
    ),
    Cause(
        "weight_norm_lost", "tensor", "bug",
        "The directions of a weight norm were taken for the weight, and the lengths are lost.",
        "One file alone has weight_g and weight_v, and the other's weight is weight_v.",
        "The directions without their lengths are the weight.",
    ),
)  # fmt: skip

SLACK = 2e-6  # relative: float32 sums of squares in another order
MOST = 1 << 26  # values of a weight


def normed_weight_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield a function for each side whose weight norm the other side has not.

    It returns {tensor key: finding} of the weights of the one and the lengths and directions of the
    other.
    """
    for normed, plain in (("a", "b"), ("b", "a")):
        sides = {label: _one_sided(rows, label) for label in (normed, plain)}
        weights = normed_weights(sides[normed])
        if weights and sides[plain]:
            yield partial(_explain_side, context, normed, plain, weights, sides[plain])


def _one_sided(rows: Mapping[str, TensorDiff], label: str) -> list[str]:
    """Return the keys of tensors that only side "a" or "b" has."""
    return [key for key, row in rows.items() if row.verdict == f"ONLY_IN_{label.upper()}"]


def _explain_side(
    context: PairContext,
    normed: str,
    plain: str,
    weights: Mapping[str, tuple[str, str]],
    others: Sequence[str],
) -> dict[str, Finding]:
    """Return {tensor key: finding} of weights that side `plain` has in place of weight norm.

    `weights` are {weight: (key of g, key of v)} of side `normed`, `others` the keys that only
    `plain` has.
    """
    found: dict[str, Finding] = {}
    for weight, (g, v) in weights.items():
        for key in others:
            same = key == weight or weight.endswith(f".{key}") or key.endswith(f".{weight}")
            readers = (
                context.reader(plain, key),
                context.reader(normed, g),
                context.reader(normed, v),
            )
            if not same or key in found:
                continue
            try:
                finding = _explain_weight(readers, (key, g, v), normed, plain)
            except AprfmtError as error:
                context.record_not_tried(("weight_norm_folded", "weight_norm_lost"), key, error)
                continue
            if finding is not None:
                found |= dict.fromkeys((key, g, v), finding)
                break
    return found


def _explain_weight(
    readers: Sequence[RowReader | None], keys: tuple[str, str, str], normed: str, plain: str
) -> Finding | None:
    """Return the finding of one weight; None if it is neither the product nor v.

    `readers` and `keys` are those of the weight, of g and of v.
    """
    weight, g, v = readers
    if weight is None or g is None or v is None or weight.shape != v.shape or v.size > MOST:
        return None
    directions = to_float64(v.whole).reshape(v.shape)
    product = normed_values(to_float64(g.whole).reshape(g.shape), directions)
    if product is None:
        return None
    values = to_float64(weight.whole).reshape(v.shape)
    slack = SLACK + 2 * pair_noise(weight.encoding, v.encoding)
    size = norms.exact_norm(values)
    if not size or not np.isfinite(size):
        return None
    apart, of_v = (norms.exact_norm(values - one) / size for one in (product, directions))
    few = weight.take(np.arange(min(weight.rows, FEW)))
    proof = prove_values(few, weight.size, 0, slack)
    one, other = normed.upper(), plain.upper()
    line = f"{other}'s {keys[0]}, {one}'s {keys[1]} and {keys[2]}"
    if apart <= slack:
        says = f"{other} has the weight whose weight norm {one} stores: lengths times directions"
        return make_finding("weight_norm_folded", keys, (says, line), None, float(apart), proof)
    if of_v <= slack:
        says = f"{other} has the directions of {one}'s weight norm for the weight: lengths are lost"
        told = (says, f"{line}; with the lengths it is {apart:.3g} of its norm away")
        return make_finding("weight_norm_lost", keys, told, float(apart), 0.0, proof)
    return None


def normed_values(g: "Array", v: "Array") -> "Array | None":
    """Return g * v / |v|, of the shape of v; None where g's shape is none of lengths of v.

    |v| is taken over the axes in which g has length 1. A number g is the length of all of v.
    """
    if g.ndim and g.ndim != v.ndim:
        return None
    if g.ndim and any(one not in (1, size) for one, size in zip(g.shape, v.shape, strict=True)):
        return None
    axes = tuple(at for at in range(v.ndim) if not g.ndim or g.shape[at] == 1)
    lengths = np.sqrt((v * v).sum(axis=axes, keepdims=True))
    made: Array = g * v / np.where(lengths > 0, lengths, 1.0)
    return made if np.isfinite(made).all() else None


HYPOTHESES = (
    JointHypothesis(
        ("weight_norm_folded", "weight_norm_lost"),
        normed_weight_groups,
        442,
        "names that belong together, before tensors are taken for renamed ones",
        one_sided=True,
    ),
)
