"""Fused tensors whose rows are in another order, searched in all parts together, with biases.

A *part* is the rows of one projection in a fused tensor: q, k or v, gate or up. A *place* is the
number of a row in B's joined tensor. A and B are the two files that are compared; a *side* is one
of them, or its tensor.

q, k and v (or gate and up) of a file that fuses them are split before they are compared. Rows that
a writer ordered otherwise then end up in other parts, and each part alone looks like a tensor of
another checkpoint. So the rows of all parts are matched together. One order for the weights and,
where they moved too, the biases is one finding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor import fused_layouts
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.joined_transposition import find_joined_exchange
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.causes.tensor.row_sources import JoinedRows, find_sources, source_runs
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import ComputedRows, RowReader, widen_values
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "fused_order", "tensor", "bug",
        "The rows of what is stored as one tensor (q, k and v; gate and up) stand in another "
        "order: per head, per KV group, row by row, by shard, parts exchanged.",
        "Every row of the parts together equals a row of the other side's, in another part.",
        "One order of all rows makes the parts equal, biases included where they moved.",
    ),
)  # fmt: skip

SHOWN = 6  # runs of rows named


@dataclass(frozen=True)
class FusedRoles:
    """Roles that writers fuse: the name of each part, and whether query heads are grouped."""

    roles: tuple[tuple[str, str], ...]  # (role, short name)
    heads: bool = False

    def keys_with_suffix(self, part: str) -> tuple[tuple[str, str], ...]:
        """Return (ROLE.part, short name) of each fused role; `part` is `weight` or `bias`."""
        return tuple((f"{role}.{part}", name) for role, name in self.roles)


FAMILIES = (
    FusedRoles((("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v")), True),
    FusedRoles((("ffn_gate", "gate"), ("ffn_up", "up"))),
    FusedRoles((("ffn_gate_exps", "gate"), ("ffn_up_exps", "up"))),
)
# Explanations of a single tensor that give way to an order of all rows.
WEAK = ("row_offset", "stale_tensor", "byte_offset", "bit_rot", "head_order", "wrong_rows")


@dataclass(frozen=True)
class RowOrder:
    """An order of fused rows: its cause, its words, and A's row at each place of B.

    `named` says that it is one of the known layouts, and not read off the rows.
    """

    cause: str
    says: str
    at: "Array"
    more: tuple[str, ...] = ()
    named: bool = False


def fused_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield a function for each layer and family of fused roles, such as q, k and v.

    It returns {tensor key: finding} of rows that moved.
    """
    layers = sorted({layer for key in rows for layer, _ in [split_key(key)] if layer is not None})
    for family in FAMILIES:
        for layer in layers:
            yield partial(_explain_layer, context, pairs, rows, family, layer)


def _explain_layer(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    rows: Mapping[str, TensorDiff],
    family: FusedRoles,
    layer: int,
) -> dict[str, Finding]:
    """Return {tensor key: finding} of a layer's fused tensors whose rows were moved; or {}."""
    weights = _joined_pair(context, pairs, family.keys_with_suffix("weight"), layer)
    biases = _joined_pair(context, pairs, family.keys_with_suffix("bias"), layer)
    # An order of the weights, which the biases may have followed.
    order = _find_row_order(rows, family, weights)
    if order is not None and weights is not None:
        found = _order_explanations(weights, order, ())
        apart = biases is not None and any(
            rows[key].verdict == "DIFFERENT" for key in _part_keys(biases)
        )
        if biases is None:
            return found
        if not apart:
            note = ("the biases stand as in A",)
            return {
                key: replace(row, evidence=(*row.evidence, *note)) for key, row in found.items()
            }
        alike = _order_explanations(biases, order, ("the biases moved with the weights",))
        return found | alike
    exchanged = _explain_exchange(rows, family, weights)
    if exchanged:
        return exchanged
    # An order of the biases alone.
    order = _find_row_order(rows, family, biases) or _find_known_order(rows, family, biases)
    if order is None or biases is None:
        return {}
    return _order_explanations(
        biases, order, ("only the biases moved: the weights do not show it",)
    )


def _joined_pair(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    roles: Sequence[tuple[str, str]],
    layer: int,
) -> DifferingPair | None:
    """Return both sides' rows of all parts, joined as one pair; None unless both have every part.

    `roles` are (role, short name) of the parts of a layer.
    """
    keys = [f"L{layer}.{role}" for role, _ in roles]
    chosen = [pairs.get(key) for key in keys]
    readers: list[tuple[RowReader, RowReader]] = []
    for pair in chosen:
        if pair is None or pair.a is None or pair.b is None or pair.a.shape != pair.b.shape:
            return None
        readers.append((_rows_of(pair.a, roles), _rows_of(pair.b, roles)))
    if len({(row.columns, len(row.shape)) for row, _ in readers}) != 1:
        return None
    first, second = (JoinedRows(keys, [pair[side] for pair in readers]) for side in (0, 1))
    case = DifferingPair(keys[0], first, second, context)
    case.known = False
    return case


def _rows_of(side: View, roles: Sequence[tuple[str, str]]) -> RowReader:
    """Return a reader of the rows of one projection; of stacked biases each value is a row."""
    reader = RowReader(side)
    if len(reader.shape) == 2 and all(role.endswith(".bias") for role, _ in roles):
        return ValueRows(reader)
    return reader


class ValueRows(ComputedRows):
    """A matrix read as a column: each of its values is a row."""

    def __init__(self, reader: RowReader) -> None:
        """Take every value of `reader` as a row of one column."""
        super().__init__(reader.side)
        self.rows, self.columns, self.shape = reader.size, 1, (reader.size,)

    @cached_property
    def whole(self) -> "Array":
        """All values [rows, 1]."""
        return widen_values(self.side.numpy()).reshape(self.rows, 1)

    def take(self, index: "Array | list[int]") -> "Array":
        """Return the values with these numbers [n, 1]."""
        return self.whole[np.asarray(index, np.int64)]


def _part_keys(case: DifferingPair) -> tuple[str, ...]:
    """Return the tensor keys of the parts that a joined pair consists of."""
    assert isinstance(case.a, JoinedRows)
    return case.a.keys


def _find_row_order(
    rows: Mapping[str, TensorDiff], family: FusedRoles, case: DifferingPair | None
) -> RowOrder | None:
    """Return the order of the joined rows that makes both sides equal.

    None if nothing is left to explain, if some row of B is none of A's, if the rows are in A's
    order or do not become equal, or if no cause names the order.
    """
    if case is None or not any(rows[key].is_unexplained(WEAK) for key in _part_keys(case)):
        return None
    assert isinstance(case.a, JoinedRows)
    # Find the source of every row of B in A's joined rows.
    at = find_sources(case.a, case.b, 0, case.slack())
    if at is None or (at < 0).any() or np.array_equal(at, np.arange(len(at))):
        return None
    # The order must make all rows equal.
    after = case.distance(lambda index: case.a.take(at[index]), case.b.take, None, case.slack())
    if not after.equal(case.slack()):
        return None
    return _name_row_order(family, case, at)


def _explain_exchange(
    rows: Mapping[str, TensorDiff], family: FusedRoles, case: DifferingPair | None
) -> dict[str, Finding]:
    """Return {tensor key: finding} of parts that were transposed as one joined tensor; or {}."""
    if case is None or not any(rows[key].is_unexplained(WEAK) for key in _part_keys(case)):
        return {}
    assert isinstance(case.a, JoinedRows)
    kv = next(iter(case.sizes("n_kv_heads")), 0) if family.heads else 0
    exchange = find_joined_exchange(case, _part_sizes(case.a, family), kv, _experts(case.a))
    if exchange is None:
        return {}
    found: dict[str, Finding] = {}
    slack = case.slack()
    for key, first, stop in zip(case.a.keys, case.a.starts, case.a.starts[1:], strict=False):
        here = np.arange(first, stop)
        before = case.distance(case.a.take, case.b.take, here)
        if before.changed and before.relative > slack:
            proof = prove_values(case.b.take(here[:FEW]), before.count, 0, slack)
            found[key] = make_finding(
                "transpose", (key,), (exchange.says,), before.relative, exchange.residual, proof
            )
    return found


def _find_known_order(
    rows: Mapping[str, TensorDiff], family: FusedRoles, case: DifferingPair | None
) -> RowOrder | None:
    """Return the known layout that makes the values of joined vectors equal; None where none does.

    For vectors only: equal values occur several times, so that the source of each is not known.
    """
    if case is None or case.a.columns != 1:
        return None
    assert isinstance(case.a, JoinedRows)
    if not any(rows[key].is_unexplained(WEAK) for key in case.a.keys):
        return None
    kv = next(iter(case.sizes("n_kv_heads")), 0) if family.heads else 0
    x, y = case.a.whole, case.b.whole
    for text, at in fused_layouts.worded_orders(_part_sizes(case.a, family), kv, _experts(case.a)):
        if np.array_equal(x[at], y):
            return RowOrder("fused_order", f"the rows of {text}", at, named=True)
    return None


def _part_sizes(joined: JoinedRows, family: FusedRoles) -> list[tuple[str, int]]:
    """Return [(short name, number of rows)] of the parts that were joined."""
    named = zip(family.keys_with_suffix("weight"), joined.readers, strict=True)
    return [(name, reader.rows) for (_, name), reader in named]


def _experts(joined: JoinedRows) -> int:
    """Return how many experts' matrices are stacked; 1 without experts."""
    shape = joined.readers[0].side.shape
    lone = 1 if isinstance(joined.readers[0], ValueRows) else 2
    return int(shape[0]) if len(shape) > lone else 1


def _name_row_order(family: FusedRoles, case: DifferingPair, at: "Array") -> RowOrder | None:
    """Return the cause and words of what moved the rows of a fused tensor, as a RowOrder.

    `at` is A's row at each place of B. None if every part keeps its own rows, or if rows are lost
    and no cut at another row explains it.
    """
    assert isinstance(case.a, JoinedRows)
    parts, outer = _part_sizes(case.a, family), _experts(case.a)
    kv = next(iter(case.sizes("n_kv_heads")), 0) if family.heads else 0
    whole = len(set(at.tolist())) == len(at)
    if whole:
        if len(set(_parts_crossed(case.a, at))) < 2 and all(
            _moves_inside_part(case.a, i, at) for i in range(len(parts))
        ):
            return None  # every part keeps its rows: an order of each alone
        text = fused_layouts.layout_words(at, parts, kv, outer)
        if text:
            cause = "row_offset" if ": rotated by" in text else "fused_order"
            return RowOrder(cause, f"the rows of {text}", at, named=" in A became " in text)
        text = f"[{' '.join(name for name, _ in parts)}]: the rows stand in another order"
        return RowOrder("fused_order", text, at, (segment_words(case.a, at),))
    by = _cut_shift(case.a, at) if outer == 1 else 0
    if by:
        text = f"cut {abs(by)} row{'s' if abs(by) > 1 else ''} too {'late' if by > 0 else 'early'}"
        return RowOrder(
            "row_offset",
            f"[{' '.join(name for name, _ in parts)}]: {text}",
            at,
            (segment_words(case.a, at),),
        )
    return None


def _cut_shift(pool: JoinedRows, at: "Array") -> int:
    """Return k if every part that moved begins k rows later in A; 0 if that does not hold.

    `at` is A's row at each place of B, `pool` A's joined rows.
    """
    away = at - np.arange(len(at))
    parts = [
        np.unique(away[start:stop])
        for start, stop in zip(pool.starts, pool.starts[1:], strict=False)
    ]
    if any(len(part) > 1 for part in parts):
        return 0
    moved = {int(part[0]) for part in parts} - {0}
    return moved.pop() if len(moved) == 1 else 0


def _parts_crossed(pool: JoinedRows, at: "Array") -> list[tuple[int, int]]:
    """Return the pairs (part of the place, part that the row is from) where these differ.

    Parts are numbered; `at` is A's row at each place of B.
    """
    places = np.searchsorted(pool.starts, np.arange(len(at)), side="right")
    owners = np.searchsorted(pool.starts, at, side="right")
    apart = places != owners
    return sorted(set(zip(places[apart].tolist(), owners[apart].tolist(), strict=True)))


def _moves_inside_part(pool: JoinedRows, part: int, at: "Array") -> bool:
    """Return whether the rows of a part moved among themselves only.

    `at` is A's row at each place of B, `pool` A's joined rows.
    """
    start, stop = pool.starts[part], pool.starts[part + 1]
    here = at[start:stop]
    return bool(((here >= start) & (here < stop)).all())


def segment_words(pool: JoinedRows, at: "Array") -> str:
    """Return in words which rows of A are at which places of B, a range of rows at a time.

    `at` is A's row at each place of B. Ranges of rows that did not move are left out.
    """
    said = []
    moved = [run for run in _runs_inside_parts(pool, at) if run[0] != run[1]]
    for first, source, length in moved[:SHOWN]:
        key, row = pool.owner(source)
        there, place = pool.owner(first)
        until = f"-{place + length - 1}" if length > 1 else ""
        source_until = f"-{row + length - 1}" if length > 1 else ""
        said.append(f"{there} {place}{until} is {key} {row}{source_until}")
    more = f" and {len(moved) - SHOWN} more runs" if len(moved) > SHOWN else ""
    return "rows of B, by those of A: " + "; ".join(said) + more


def _runs_inside_parts(pool: JoinedRows, at: "Array") -> Iterator[tuple[int, int, int]]:
    """Yield (first place, first row of A, length) of rows that follow each other in A and in B.

    Such a range of rows ends where a part of A or B begins. `at` is A's row at each place of B.
    """
    for first, source, length in source_runs(at):
        cuts = {start - row for start in pool.starts for row in (first, source)}
        ends = sorted(cut for cut in {*cuts, length} if 0 < cut <= length)
        for begin, end in pairwise((0, *ends)):
            yield first + begin, source + begin, end - begin


def _order_explanations(
    case: DifferingPair, order: RowOrder, more: tuple[str, ...]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of every part that an order of rows changes; {} for no fit.

    `more` are further lines of evidence.
    """
    assert isinstance(case.a, JoinedRows) and isinstance(case.b, JoinedRows)
    found: dict[str, Finding] = {}
    if len(order.at) != case.a.rows:
        return {}
    for i, key in enumerate(case.a.keys):
        rows = np.arange(case.a.starts[i], case.a.starts[i + 1])
        before = case.distance(case.a.take, case.b.take, rows)
        slack = case.slack()
        after = case.distance(lambda index: case.a.take(order.at[index]), case.b.take, rows, slack)
        if not after.equal(slack):
            return {}
        if before.changed and before.relative > slack:
            # A row of an unknown order is a number that was found on the row.
            free = 0 if order.named else len(rows)
            proof = prove_values(case.b.take(rows[:FEW]), after.count, free, slack)
            found[key] = make_finding(
                order.cause, (key,), (order.says, *order.more, *more), before.relative,
                after.relative, proof,
            )  # fmt: skip
    return found


HYPOTHESES = (
    JointHypothesis(
        ("fused_order", "row_offset", "transpose"),
        fused_groups,
        420,
        "an order of rows, before factors of them",
        weak=WEAK,
    ),
)
