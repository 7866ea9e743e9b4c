"""Tensors of which one side has one rank's part, or the joined copies of all ranks.

A *part* is what one rank of a tensor-parallel run keeps of a matrix, equally much on each rank: of
its rows where the ranks divide what a layer computes (q, k, v, gate, up, the embedding), of its
columns where they add it up (o, down). A checkpoint made of one rank's file, or saved without
gathering, has such parts under the names and the configuration of the whole model. The other
mistake is to join what every rank has a copy of, such as norms, as if these copies were parts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.causes.tensor.shard_copies import LARGE, TOGETHER, are_equal_parts, matrix_of
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "rank_part", "tensor", "bug",
        "Tensors are stored in part: what one rank of a tensor-parallel run held, without the "
        "parts of the other ranks.",
        "Shapes have one axis divided by one number, and the configurations state the same sizes.",
        "In all these tensors the values are those of the same part of the other side's tensor.",
        weights="rank",
    ),
    Cause(
        "rank_copies", "tensor", "bug",
        "A tensor holds the other side's values several times: the copies of all ranks were joined "
        "as if they were parts.",
        "One axis is a multiple of the other side's, and the configurations state the same sizes.",
        "Each of the equal parts of the longer tensor is the shorter one.",
        weights="rank",
    ),
)  # fmt: skip

# Explanations of one tensor alone, which ranks replace.
WEAK = ("row_offset", "padded_vocabulary", "stale_tensor")
OF_TABLES = ("vocab_size",)  # sizes that are read from the length of a table of tokens


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor cut into `count` equal parts along `axis`, and the other file's smaller tensor.

    `small` is the file ("A" or "B") with the smaller tensor. `equal` are the numbers (from 0) of
    the parts that equal it within relative distance `slack`. `values` are some of its values,
    `size` is how many it has.
    """

    small: str
    equal: tuple[int, ...]
    count: int
    axis: int
    slack: float
    values: "Array"
    size: int


def rank_part_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of one rank's parts, or ranks' copies.

    Nothing where the models state different sizes: a smaller model has smaller tensors.
    """
    if _state_equal_sizes(context):
        yield partial(_explain_cuts, context, pairs, rows)


def _state_equal_sizes(context: PairContext) -> bool:
    """Return whether both models have equal hyperparameters, apart from sizes of token tables."""
    if len(context.hyper) < 2:
        return False
    first, second = (
        {name: value for name, value in one.items() if name not in OF_TABLES}
        for one in context.hyper
    )
    return first == second


def _explain_cuts(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of all tensors that are a rank's part, or ranks' copies joined.

    Parts count only if one rank's are in two kinds of tensors or more: rows of one kind of tensor
    may have been cut for another reason.
    """
    unequal = (
        key
        for key, row in rows.items()
        if row.verdict == "SHAPE_DIFFERS" and not row.is_explained(WEAK)
    )
    cuts = dict(find_in_pairs(context, pairs, unequal, ("rank_part", "rank_copies"), _find_cut))
    made: dict[str, Finding] = {}
    ranks: dict[tuple[str, int, int], list[str]] = {}
    for key, cut in cuts.items():
        if len(cut.equal) == 1:
            ranks.setdefault((cut.small, cut.equal[0], cut.count), []).append(key)
        elif len(cut.equal) == cut.count:
            made[key] = _copies_finding(key, cut, pairs[key])
    for keys in ranks.values():
        if len({matrix_of(key) for key in keys}) >= TOGETHER:
            made |= {key: _part_finding(key, cuts[key], pairs[key]) for key in keys}
    return made


def _part_finding(key: str, cut: Cut, pair: TensorPair) -> Finding:
    """Return the finding that a tensor is one rank's part; its first sentence names no tensor."""
    says = (
        f"{cut.small} holds part {cut.equal[0] + 1} of {cut.count} of these tensors, as one rank "
        f"of {cut.count} holds them; the parts of the other ranks are not there"
    )
    return _make_cut_finding("rank_part", key, cut, pair, says, cut.small)


def _copies_finding(key: str, cut: Cut, pair: TensorPair) -> Finding:
    """Return the finding that one file has every rank's copy of a tensor joined to one tensor."""
    large = "A" if cut.small == "B" else "B"
    says = (
        f"{large} holds these tensors {cut.count} times, one copy after the other, as where the "
        f"copies of {cut.count} ranks were joined like parts"
    )
    return _make_cut_finding("rank_copies", key, cut, pair, says, large)


def _make_cut_finding(
    cause: str, key: str, cut: Cut, pair: TensorPair, says: str, side: str
) -> Finding:
    """Return the finding of a cause, with both shapes; `side` is the one that is wrong."""
    assert pair.a is not None and pair.b is not None
    line = f"A has shape {list(pair.a.shape)}, B {list(pair.b.shape)}: cut along axis {cut.axis}"
    proof = prove_values(cut.values, cut.size, cut.count, cut.slack)
    return replace(make_finding(cause, (key,), (says, line), None, cut.slack, proof), side=side)


def _find_cut(pair: TensorPair) -> Cut | None:
    """Return a Cut of the larger tensor, some of whose parts equal the smaller, or None.

    None too for a tensor of one repeated value, which equals every part of such a tensor.
    """
    if pair.a is None or pair.b is None:
        return None
    label = "A" if math.prod(pair.a.shape) < math.prod(pair.b.shape) else "B"
    small, large = (pair.a, pair.b) if label == "A" else (pair.b, pair.a)
    axis = _cut_axis(small.shape, large.shape)
    if axis is None or math.prod(large.shape) > LARGE:
        return None
    count = large.shape[axis] // small.shape[axis]
    # The tensor as [before, along the axis, after], so that any axis is cut in one way.
    outer, inner = math.prod(large.shape[:axis]), math.prod(large.shape[axis + 1 :])
    whole = RowReader(large).whole.reshape(outer, count, small.shape[axis], inner)
    part = RowReader(small).whole.reshape(outer, small.shape[axis], inner)
    if part.min() == part.max():
        return None
    same = pair.a.encoding == pair.b.encoding
    slack = 0.0 if same else 2 * pair_noise(pair.a.encoding, pair.b.encoding)
    equal = tuple(at for at in range(count) if are_equal_parts(whole[:, at], part, slack))
    if not equal:
        return None
    return Cut(label, equal, count, axis, slack, part.reshape(-1)[:FEW], math.prod(small.shape))


def _cut_axis(small: Sequence[int], large: Sequence[int]) -> int | None:
    """Return the only axis along which shape `large` is a multiple of shape `small`, or None.

    None where another axis differs, or none does.
    """
    if len(small) != len(large):
        return None
    apart = [axis for axis, (n, m) in enumerate(zip(small, large, strict=True)) if n != m]
    if len(apart) != 1 or not small[apart[0]] or large[apart[0]] % small[apart[0]]:
        return None
    return apart[0]


HYPOTHESES = (
    JointHypothesis(
        ("rank_part", "rank_copies"),
        rank_part_groups,
        444,
        "the same part of several tensors, or whole copies, in place of rows cut from each",
        shapes=True,
    ),
)
