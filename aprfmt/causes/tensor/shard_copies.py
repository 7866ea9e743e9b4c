"""Tensor-parallel checkpoints joined with one shard twice, another missing or misplaced.

A *shard*, or part, is what one rank holds of a matrix, equally much on each rank: of its rows where
they divide what a layer computes (q, k, v, gate, up), of its columns where they add it up (o,
down). A merge that read one rank's file twice leaves the same parts in all these tensors. Each
tensor alone looks as if its rows were shifted or repeated, or its columns damaged.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.sequences import first_and_more
from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.differing_pair import WINDOW
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

Part = TypeVar("Part")  # equal parts of a tensor: arrays, or read in pieces
RANKS = (2, 4, 8, 16)  # numbers of shards that are tried, the fewest first
TOGETHER = 2  # kinds of tensors whose rows show the same parts: of one they may be heads
LARGE = 1 << 28  # elements from which a tensor is not looked at, ...
LONG = 1 << 20  # ... and a vector: no bias is so long
SPOTS = 64  # values of a part that are compared before all of them
WEAK = ("wrong_rows", "row_offset", "head_order", "stale_tensor", "byte_offset", "bit_rot")
SHOWN = 4
SHOWN_VALUES = 1 << 12  # values that a proof looks at


@dataclass(frozen=True)
class SharedParts:
    """Equal parts of B along an axis (0 rows, 1 columns): part i is part `order`[i] of A.

    `before` and `after` are the relative distances as stored and in that order.
    """

    order: tuple[int, ...]
    axis: int
    before: float
    after: float
    changed: int
    slack: float
    values: "Array"


def shard_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of shards that were read twice."""
    yield partial(_explain_shards, context, pairs, rows)


def _explain_shards(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of all tensors in which the same shard is there twice."""
    made: dict[str, Finding] = {}
    for order, tensors in _parts_by_order(context, pairs, rows).items():
        whole_rows = all(parts.axis == 0 for parts in tensors.values())
        if whole_rows and len({matrix_of(key) for key in tensors}) < TOGETHER:
            continue  # rows of one kind of tensor: heads of k, say
        made |= {key: _shard_finding(key, order, parts) for key, parts in tensors.items()}
    return made


def _parts_by_order(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    rows: Mapping[str, TensorDiff],
    *,
    exchanged: bool = False,
) -> dict[tuple[int, ...], dict[str, SharedParts]]:
    """Return {order of the shards: {tensor key: its parts}} of all tensors that have one.

    The order says which rank's shard stands first, second, and so on. `exchanged`: each shard is
    there once, in another order; else one is there twice.
    """
    found: dict[tuple[int, ...], dict[str, SharedParts]] = {}
    keys = (key for key, row in rows.items() if row.is_unexplained(WEAK))
    find = partial(_find_parts, exchanged=exchanged)
    for key, parts in find_in_pairs(context, pairs, keys, ("shard_order",), find):
        found.setdefault(parts.order, {})[key] = parts
    return found


def matrix_of(key: str) -> str:
    """Return the role of a weight or bias without its layer and suffix, such as "attn_q"."""
    return split_key(key)[1].rpartition(".")[0]


def _shard_finding(key: str, order: tuple[int, ...], parts: SharedParts) -> Finding:
    """Return the finding of one tensor; its first sentence is the same for all with this order."""
    proof = prove_values(parts.values, parts.changed, len(order), parts.slack)
    line = f"{('rows', 'columns')[parts.axis]} in {len(order)} equal parts"
    return make_finding(
        "shard_order", (key,), (_order_sentence(order), line), parts.before, parts.after, proof
    )


def _order_sentence(order: tuple[int, ...]) -> str:
    """Return a sentence on the order of the ranks' shards, without the tensor's name."""
    moved = [(at, source) for at, source in enumerate(order) if at != source]
    shown = first_and_more(
        moved, SHOWN, lambda move: f"that of rank {move[1]} where rank {move[0]}'s belongs"
    )
    lost = sorted(set(range(len(order))) - set(order))
    if not lost:
        return f"the {len(order)} shards were joined in another order: {shown}"
    names = ", ".join(map(str, lost[:SHOWN]))
    return f"one shard of {len(order)} was joined twice: {shown}; nothing of rank {names} is there"


def _find_parts(pair: TensorPair, *, exchanged: bool = False) -> SharedParts | None:
    """Return which shard of A each shard of B equals, if one is there twice; else None.

    `exchanged`: if each is there once, in another order. Each matrix of a stack is cut by itself.
    """
    if pair.a is None or pair.b is None or pair.a.shape != pair.b.shape or not pair.a.shape:
        return None
    shape = pair.a.shape
    if math.prod(shape) > (LARGE if len(shape) > 1 else LONG):
        return None
    x, y = RowReader(pair.a), RowReader(pair.b)
    tall, wide = shape[-2:] if len(shape) > 1 else (shape[0], 1)
    same = pair.a.encoding == pair.b.encoding
    slack = 0.0 if same else 2 * pair_noise(pair.a.encoding, pair.b.encoding)
    for axis in range(1 if len(shape) < 2 else 2):
        for ranks in RANKS:
            if (tall, wide)[axis] % ranks:
                break
            sources, parts = (
                [Shard(side, tall, axis, at, ranks) for at in range(ranks)] for side in (x, y)
            )
            order = _order_of_parts(sources, parts, slack, are_equal_shards)
            if order is None:
                continue
            if (len(set(order)) == ranks) != exchanged or order == tuple(range(ranks)):
                return None  # exchanged, or in place: an order of rows or columns
            return _shared_parts(x, y, tall, axis, order, slack)
    return None


@dataclass(frozen=True)
class Shard:
    """One rank's part of every matrix of a tensor, along an axis (0 rows, 1 columns).

    There are `ranks` equal parts; `at` is the number of this one.
    """

    reader: RowReader
    tall: int
    axis: int
    at: int
    ranks: int

    def take(self, index: "Array") -> "Array":
        """Return rows of the part by their numbers in it, counted through all matrices."""
        if self.axis:
            wide = self.reader.columns // self.ranks
            return self.reader.take(index)[:, self.at * wide : (self.at + 1) * wide]
        part = self.tall // self.ranks
        return self.reader.take(index // part * self.tall + self.at * part + index % part)

    @property
    def rows(self) -> int:
        """The number of rows of the part in all matrices."""
        return self.reader.rows // (1 if self.axis else self.ranks)

    def pieces(self) -> "Iterator[Array]":
        """Yield arrays of row numbers of the part, of at most WINDOW elements each."""
        for index in row_windows(self.reader, self.rows):
            yield index
            self.reader.side.drop()


def row_windows(reader: RowReader, rows: int) -> "Iterator[Array]":
    """Yield the row numbers 0 to `rows` - 1 in order, in arrays of at most WINDOW values' rows."""
    step = max(1, WINDOW // max(1, reader.columns))
    for start in range(0, rows, step):
        yield np.arange(start, min(rows, start + step))


def are_equal_shards(x: Shard, y: Shard, slack: float) -> bool:
    """Return whether two parts are equal, within relative distance `slack` if that is not 0.

    A few rows are compared before all.
    """
    spots = np.linspace(0, x.rows - 1, min(8, x.rows)).astype(np.int64)
    few, other = x.take(spots), y.take(spots)
    if norms.exact_norm(other - few) > 4 * slack * norms.exact_norm(few):
        return False
    if not slack:
        return all(np.array_equal(x.take(index), y.take(index)) for index in x.pieces())
    away = size = 0.0
    for index in x.pieces():
        own, its = x.take(index), y.take(index)
        away += norms.exact_norm(its - own) ** 2
        size += norms.exact_norm(own) ** 2
    return bool(away**0.5 <= slack * size**0.5)


def _shared_parts(
    x: RowReader, y: RowReader, tall: int, axis: int, order: tuple[int, ...], slack: float
) -> SharedParts:
    """Return the distances of `y` from `x`, as stored and with the parts of `x` in `order`.

    `tall` is the number of rows of a matrix; the parts lie along `axis`.
    """
    numbers = np.arange(x.columns if axis else tall).reshape(len(order), -1)
    moved = numbers[list(order)].reshape(-1)
    size = before = after = 0.0
    changed = 0
    for index in row_windows(x, x.rows):
        own, its = x.take(index), y.take(index)
        made = own[:, moved] if axis else x.take(index // tall * tall + moved[index % tall])
        size += norms.exact_norm(own) ** 2
        before += norms.exact_norm(its - own) ** 2
        after += norms.exact_norm(its - made) ** 2
        changed += int((own != its).sum())
        x.side.drop()
        y.side.drop()
    norm = size**0.5 or 1.0
    first = y.take(np.arange(min(y.rows, -(-SHOWN_VALUES // y.columns))))
    return SharedParts(
        order, axis, before**0.5 / norm, after**0.5 / norm, changed, slack,
        first.reshape(-1)[:SHOWN_VALUES],
    )  # fmt: skip


def _order_of_parts(
    sources: list[Part], parts: list[Part], slack: float, equal: Callable[[Part, Part, float], bool]
) -> tuple[int, ...] | None:
    """Return the number of the source that each part equals, its own first; else None.

    None if a part equals no source, and where two sources are equal: then no part says whose it is.
    `equal` compares two of them, within a relative distance.
    """
    order = []
    for at, part in enumerate(parts):
        every = [at, *(n for n in range(len(sources)) if n != at)]
        source = next((n for n in every if equal(sources[n], part, slack)), None)
        if source is None:
            return None
        order.append(source)
    moved = [source for at, source in enumerate(order) if at != source]
    if any(
        equal(sources[n], sources[m], slack) for n in moved for m in range(len(sources)) if m != n
    ):
        return None
    return tuple(order)


def are_equal_parts(x: "Array", y: "Array", slack: float) -> bool:
    """Return whether two parts are equal, within relative distance `slack` if that is not 0."""
    spots = (slice(None), *(slice(None, None, max(1, n // 8)) for n in x.shape[1:]))
    few, other = x[spots].reshape(-1)[:SPOTS], y[spots].reshape(-1)[:SPOTS]
    if norms.exact_norm(other - few) > 4 * slack * norms.exact_norm(few):
        return False
    if not slack:
        return bool(np.array_equal(x, y))
    return bool(norms.exact_norm(y - x) <= slack * norms.exact_norm(x))


# --- matrices that the file holds as one ----------------------------------------------------------

# Roles that some layouts store as one matrix, in the order of its rows.
FUSED = (("attn_q.weight", "attn_k.weight", "attn_v.weight"), ("ffn_gate.weight", "ffn_up.weight"))
# What rows of such a matrix are called while its parts are looked at alone, or for one of them.
ALONE = (
    "wrong_rows", "row_offset", "head_order", "stale_tensor", "byte_offset", "bit_rot",
    "tp_mismatch", "gqa_mapping", "fused_order",
)  # fmt: skip


def joined_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield a function that returns {tensor key: finding} of misplaced shards of fused matrices.

    A rank stores its shard of each matrix that is fused, such as q, k and v. Shards that were
    joined rank by rank are not in the order of these matrices, and one may be there twice or in the
    position of another rank's.
    """
    yield partial(_explain_joined, context, pairs, rows)


def _explain_joined(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of the parts of fused matrices whose shards are misplaced."""
    made: dict[str, Finding] = {}
    layers = dict.fromkeys(split_key(key)[0] for key in rows)
    for layer in layers:
        for roles in FUSED:
            keys = [role if layer is None else f"L{layer}.{role}" for role in roles]
            if not all(key in rows and rows[key].is_unexplained(ALONE) for key in keys):
                continue
            try:
                found = _find_joined([pairs[key] for key in keys])
            except AprfmtError as error:
                context.record_not_tried(("shard_order",), keys[0], error)
                continue
            finally:
                for key in keys:
                    pairs[key].drop()
            if found is not None:
                says = (
                    f"{_order_sentence(found.order)}; of a fused matrix, each rank's rows together"
                )
                for key in keys:
                    stats = rows[key].stats
                    before = found.before if stats is None else stats.rel_l2
                    proof = prove_values(found.values, found.changed, len(found.order), found.slack)
                    line = f"the fused rows in {len(found.order)} equal parts"
                    made[key] = make_finding(
                        "shard_order", (key,), (says, line), before, found.after, proof
                    )
    return made


def _find_joined(parts: list[TensorPair]) -> SharedParts | None:
    """Return which rank's shard each equal part of B's fused matrix is; None for none.

    None too where the shards are in order: then only the fused rows have another order.
    """
    first, second = ([pair.a for pair in parts], [pair.b for pair in parts])
    if any(
        x is None or y is None or x.shape != y.shape for x, y in zip(first, second, strict=True)
    ):
        return None
    own = [side for side in second if side is not None]
    if len({side.stored[0].info.name for side in own}) > 1:
        return None
    if sum(math.prod(side.shape) for side in own) > LARGE:
        return None
    x, y = (
        [RowReader(side).whole for side in sides if side is not None] for sides in (first, second)
    )
    encodings = first[0].encoding if first[0] is not None else "", own[0].encoding
    slack = 0.0 if encodings[0] == encodings[1] else 2 * pair_noise(*encodings)
    joined, whole = np.concatenate(y), np.concatenate(x)
    for ranks in RANKS:
        if any(len(rows) % ranks for rows in x):
            break
        shards = [np.concatenate(one) for one in zip(*(np.split(r, ranks) for r in x), strict=True)]
        order = _order_of_parts(shards, np.split(joined, ranks), slack, are_equal_parts)
        if order is None or order == tuple(range(ranks)):
            continue
        made = np.concatenate([shards[at] for at in order])
        norm = norms.exact_norm(whole) or 1.0
        return SharedParts(
            order, 0, norms.exact_norm(joined - whole) / norm,
            norms.exact_norm(joined - made) / norm, int((joined != whole).sum()), slack,
            joined.reshape(-1)[:SHOWN_VALUES],
        )  # fmt: skip
    return None


def exchanged_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of shards joined in another order.

    Attention and MLP must show the same order. In one of them alone it may be heads, or neurons,
    that are in another order.
    """
    yield partial(_explain_exchanged, context, pairs, rows)


def _explain_exchanged(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of all tensors whose shards are in the same wrong order."""
    made: dict[str, Finding] = {}
    for order, tensors in _parts_by_order(context, pairs, rows, exchanged=True).items():
        kinds = {matrix_of(key).partition("_")[0] for key in tensors}
        if len(kinds) >= TOGETHER:
            made |= {key: _shard_finding(key, order, parts) for key, parts in tensors.items()}
    return made


HYPOTHESES = (
    JointHypothesis(
        ("shard_order",),
        shard_groups,
        400,
        "the same parts of several tensors, before an order of the rows of some",
        weak=WEAK,
    ),
    JointHypothesis(
        ("shard_order",),
        joined_groups,
        401,
        "shards of fused matrices, before an order of their rows",
        weak=ALONE,
    ),
    JointHypothesis(
        ("shard_order",),
        exchanged_groups,
        415,
        "shards in another order, once no order leaves the function as it is",
        weak=WEAK,
    ),
)
