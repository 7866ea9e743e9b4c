"""Tensors of which one side holds the part that one rank of a partitioned run had.

A tensor-parallel run keeps an equal part of a matrix on each rank: of its rows where the ranks
divide what a layer computes (q, k, v, gate, up, the embedding), of its columns where they add it
up (o, down). A checkpoint made of one rank's file, or saved without gathering, has such parts
under the names and the configuration of the whole model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.causes.tensor.shard_copies import LARGE, TOGETHER, are_equal_parts, matrix_of
from aprfmt.errors import AprfmtError
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
    ),
)  # fmt: skip

OF_TABLES = ("vocab_size",)  # sizes that are read from the length of a table of tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Where a smaller tensor lies in a larger one: part `number` (from 0) of `count` equal ones.

    The larger tensor is cut along `axis`. `label` is the side ("A" or "B") with the smaller one.
    `distance` is their relative distance, at most `slack`. `values` are some of the part's values,
    `size` is how many it has.
    """

    label: str
    number: int
    count: int
    axis: int
    distance: float
    slack: float
    values: "Array"
    size: int


def rank_part_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of tensors stored as one rank's part.

    Nothing where the models state different sizes: a smaller model has smaller tensors.
    """
    if _state_equal_sizes(context):
        yield partial(_explain_parts, context, pairs, rows)


def _state_equal_sizes(context: PairContext) -> bool:
    """Return whether both models have the same hyperparameters, but for sizes of token tables."""
    if len(context.hyper) < 2:
        return False
    first, second = (
        {name: value for name, value in one.items() if name not in OF_TABLES}
        for one in context.hyper
    )
    return first == second


def _explain_parts(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of all tensors that are the same part of the other side's.

    One kind of tensor alone is left out: its rows may have been cut for another reason.
    """
    parts: dict[str, Part] = {}
    for key, row in rows.items():
        if row.verdict != "SHAPE_DIFFERS":
            continue
        try:
            part = _find_part(pairs[key])
        except AprfmtError as error:
            context.record_not_tried(("rank_part",), key, error)
            continue
        finally:
            pairs[key].drop()
        if part is not None:
            parts[key] = part
    groups: dict[tuple[str, int, int], list[str]] = {}
    for key, part in parts.items():
        groups.setdefault((part.label, part.number, part.count), []).append(key)
    made: dict[str, Finding] = {}
    for keys in groups.values():
        if len({matrix_of(key) for key in keys}) >= TOGETHER:
            made |= {key: _part_finding(key, parts[key], pairs[key]) for key in keys}
    return made


def _part_finding(key: str, part: Part, pair: TensorPair) -> Finding:
    """Return the finding of one tensor; its first sentence is that of all tensors of the rank."""
    assert pair.a is not None and pair.b is not None
    says = (
        f"{part.label} holds part {part.number + 1} of {part.count} of these tensors, as one rank "
        f"of {part.count} holds them; the parts of the other ranks are not there"
    )
    line = f"A has shape {list(pair.a.shape)}, B {list(pair.b.shape)}: cut along axis {part.axis}"
    proof = prove_values(part.values, part.size, part.count, part.slack)
    found = make_finding("rank_part", (key,), (says, line), None, part.distance, proof)
    return replace(found, side=part.label)


def _find_part(pair: TensorPair) -> Part | None:
    """Return which equal part of one tensor the other is; None if it is none, or several alike."""
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
    same = pair.a.encoding == pair.b.encoding
    slack = 0.0 if same else 2 * pair_noise(pair.a.encoding, pair.b.encoding)
    found = [at for at in range(count) if are_equal_parts(whole[:, at], part, slack)]
    if len(found) != 1:
        return None
    return Part(
        label, found[0], count, axis, slack, slack, part.reshape(-1)[:FEW], math.prod(small.shape)
    )


def _cut_axis(small: Sequence[int], large: Sequence[int]) -> int | None:
    """Return the one axis along which `large` is a multiple of `small`; None for any others."""
    if len(small) != len(large):
        return None
    apart = [axis for axis, (n, m) in enumerate(zip(small, large, strict=True)) if n != m]
    if len(apart) != 1 or not small[apart[0]] or large[apart[0]] % small[apart[0]]:
        return None
    return apart[0]


HYPOTHESES = (
    JointHypothesis(
        ("rank_part",),
        rank_part_groups,
        445,
        "the same part of several tensors, in place of rows cut from each",
        shapes=True,
    ),
)
