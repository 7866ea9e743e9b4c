"""Weights derived from the other side's model: trained further, merged with an adapter, pruned.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A damaged copy differs in few tensors. If nearly all matrices differ a little or a lot, and are
related to the other side's, the file is derived from it. So it is if the differing matrices are
those that people train: all matrices of some kinds in some layers (the MLP, the experts, the last
layers), or the head or the table of tokens alone. A pruned one has zeros for small values. An
adapter adds a product of few columns: the difference has a low rank in all matrices it was made
for, in all layers or in one matrix alone. If it was merged into one shard only, the ranks are low
there and nothing differs elsewhere. A light training moves most values by a unit in the last place
at most, which looks like rounding.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.differing_pair import WINDOW
from aprfmt.causes.tensor.faults_of_trained import MovedMatrix, faults_of_trained
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.causes.tensor.row_space import row_basis, squares_inside, tail_norms
from aprfmt.causes.tensor.token_tables import extra_rows_text, rows_by_token
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import UNIT, pair_noise, storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import short_keys
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.causes.tensor.row_space import Pieces
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "lora_merge", "identity", "not_comparable",
        "An adapter of low rank was merged into one side, or once more than into the other: other "
        "weights, derived from the same ones.",
        "The differences of an adapter's targets have a low rank, in all layers or in few matrices "
        "alone; nothing else differs.",
        "The rank of every difference. The weights do not say which side was merged, or whether "
        "it was merged twice.",
        next="distances",
        most="located",
        weights="trained",
    ),
    Cause(
        "partial_merge", "tensor", "bug",
        "An adapter was merged into some shards, or some layers, only.",
        "Differences of low rank in one shard's matrices, none in the others'.",
        "The rank of every difference, and the shards that hold the tensors.",
        most="located",
    ),
    Cause(
        "derived", "identity", "not_comparable",
        "One side was trained further, pruned, made of the other's layers, or lost a direction of "
        "the stream: other weights, not a damaged copy.",
        "Nearly all matrices differ and are related to the other side's.",
        "Most matrices differ, by the printed distances, and correlate with the other side's.",
        next="distances",
        most="located",
        weights="trained",
    ),
)  # fmt: skip

_CAUSES = ("lora_merge", "partial_merge", "derived")
MOST_RANK = 256  # the largest rank looked for
FIRST = 24  # rank that is looked for first
FULL = 0.9  # share of a difference outside such a sketch from which its rank is not low
SHARE = 0.25  # of a matrix's smaller side that a low rank has at most
HIDDEN = 0.2  # share of a difference up to which rounding hides no singular value
EVEN = 1.25  # times the largest singular value of even noise that one of rounding has at most
ABOVE = 1.5  # the same that one of an adapter has at least
FEW = 3  # differing matrices that are a fault rather than a training
PAIR = 2  # matrices from which they can share a run of layers, a direction or a training
NEARLY_ALL = 0.5  # share of all matrices from which it need not be asked which a training changed
TABLES = frozenset({"token_embd.weight", "output.weight"})  # which may be trained alone
RELATED = 0.2  # correlation of the values from which two tensors belong together
AKIN = 0.5  # the same of vectors, once their mean is taken away
MOVED = 0.7  # share of a vector's change from which it follows the values, or is one number
ALIKE = 4.0  # times what the others moved that a tensor of the same training moves at most
LEAST = 16  # values of a vector below which its change says nothing
FINE = 0.03  # rounding of the coarser encoding up to which a rank shows
SMALL = 64 << 20  # elements of a matrix up to which its difference is looked at
SMALLER = 0.75  # of the others' mean size that values have at most which a pruning took
TABLE = "token_embd."  # begins the role of the table whose rows are the stream
WRITERS = ("attn_output.", "ffn_down")  # begin the roles of matrices whose outputs are
POWERS = 8  # steps to the largest singular vector of a difference that has one alone
SAME_LINE = 0.99  # cosine from which two vectors are the same direction
WHOLE = 0.05  # of the share of a direction that was removed, within which it is all of it
LIGHT = 0.25  # share of a vector's values that a light training moves at least in 16 bits
LOOKED_AT, NARROW, TURNS = 512, 16, 6  # rows and columns looked at; the fewest; steps of the fit
FACTORED = 0.5  # share of a squared difference that factors make: a training's is near 0
TINY = 1e-300
_OR_TRAINED = ", or a training changed these layers alone"
EVERY_ROW = 0.5  # share of the rows and columns that a merge or a training changes at least


@dataclass(frozen=True)
class MatrixChange:
    """How a matrix differs: rank of the difference (0: not low), its size, the correlation."""

    key: str
    rank: int
    size: float
    related: float
    plain: bool  # both sides are stored as floats
    experts: tuple[int, ...] = ()  # of a stack, those that differ, where not all do
    pruned: float = 0.0  # share of the values that B has set to zero, where all others are equal
    of_four: int = 0  # so many of every four values in a row are, where it is the same everywhere
    factored: float = 0.0  # share of the difference that factors of rows and columns make
    removed: "Removal | None" = None  # a direction of the stream that B's matrix has no more


@dataclass(frozen=True, eq=False)
class Removal:
    """A direction of the residual stream, [hidden_size], and the `share` of it a matrix lost."""

    direction: "Array"
    share: float


def whole_model(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function, which returns {tensor key: finding} of a training, merge or pruning.

    The finding is about the whole model.
    """
    yield partial(_explain_model, context, pairs, list(rows.values()))


def _explain_model(
    context: PairContext, by_key: Mapping[str, TensorPair], rows: Sequence[TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} that B is a training, merge or pruning of A; {} if it is not."""
    # Matrices that differ without an explanation.
    matrices = [
        row
        for row in rows
        if row.shape_a is not None and len(row.shape_a) > 1 and row.shape_a == row.shape_b
    ]
    coarse = context.schemes.decoded  # codes decoded again: a fault of these looks like training
    floats_trained = _floats_were_trained(by_key, rows, coarse)
    open_ = [
        row
        for row in matrices
        if (_is_unexplained_float(row) and row.key not in coarse)
        or (floats_trained and _is_open(row))
    ]
    light, moved = _light_training(rows, matrices)
    open_ = light or open_
    if not open_:
        found = _explain_vectors_alone(by_key, rows)
        if not found and any(row.is_unexplained() for row in rows):
            return found
        return found | _table_explanations(context, by_key, rows)
    # Measure how each of them differs.
    keys = [row.key for row in open_]
    measured = find_in_pairs(context, by_key, keys, _CAUSES, _matrix_change)
    changes = [change for _, change in measured]
    # A fault of one matrix would be counted as a part of the training.
    moved_far = faults_of_trained(
        context, by_key, [MovedMatrix(one.key, one.size, one.related) for one in changes]
    )
    rest = [one for one in changes if one.key not in moved_far]
    others = [row for row in matrices if row.key not in moved_far]
    made = _derived_explanations(by_key, others, rest, floats_trained, len(moved_far))
    if not made and moved_far:
        made, moved_far = _derived_explanations(by_key, matrices, changes, floats_trained), {}
    if made and next(iter(made.values())).cause in ("derived", "stale_tensor"):
        vectors = [row for row in rows if not light or row.key in moved]
        made |= _vector_explanations(vectors, next(iter(made.values())))
    return made | moved_far | _table_explanations(context, by_key, rows) if made else made


def _light_training(
    rows: Sequence[TensorDiff], matrices: Sequence[TensorDiff]
) -> tuple[list[TensorDiff], set[str]]:
    """Return (matrices that a light training changed, keys of all tensors it changed).

    Small steps move values by at most one unit in the last place, as sums in another order do:
    such matrices are called rounding, which is not proven. If another tensor is beyond that
    bound, by at most a few times of what these matrices moved, one training is taken to have
    changed them all. ([], set()) where no such tensor is found, or where few matrices differ.
    """
    bounded = [
        row
        for row in matrices
        if row.verdict == "DIFFERENT"
        and row.explanation is not None
        and row.explanation.cause == "rounding"
        and not _is_sure(row)
    ]
    beyond = [row for row in rows if _is_unexplained_float(row) and row.shape_a == row.shape_b]
    if not bounded or not beyond:
        return [], set()
    moved = [_measure_change(row) for row in bounded]
    most = [ALIKE * max(one) for one in zip(*moved, strict=True)]
    near = [
        row
        for row in beyond
        if any(x <= y for x, y in zip(_measure_change(row), most, strict=True))
    ]
    keys = {row.key for row in (*bounded, *near)}
    found = [row for row in matrices if row.key in keys]
    enough = near and len(found) >= max(FEW, NEARLY_ALL * len(matrices))
    return (found, keys) if enough else ([], set())


def _measure_change(row: TensorDiff) -> tuple[float, float]:
    """Return (root mean square of the change, relative L2 of the change) of a tensor.

    Steps of Adam have one size in all tensors, those of other optimizers are proportional to the
    values. Both are infinite where a value is not finite.
    """
    stats = row.stats
    if stats is None or stats.nonfinite is not None:
        return math.inf, math.inf
    apart = stats.rel_l2 * stats.norm_a if stats.norm_a else stats.norm_b
    return apart / max(1, stats.count) ** 0.5, apart / (stats.norm_a or 1.0)


def _table_explanations(
    context: PairContext, by_key: Mapping[str, TensorPair], rows: Sequence[TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of token tables that were lengthened or cut, and trained.

    The table has another length in A than in B, and the rows that both have correlate. Tables that
    lost rows of existing ids are left out.
    """
    found: dict[str, Finding] = {}
    for row in rows:
        if row.verdict != "SHAPE_DIFFERS" or _is_sure(row):
            continue
        pair = by_key[row.key]
        if row.key not in TABLES or pair.a is None or pair.b is None:
            continue
        first, second = RowReader(pair.a), RowReader(pair.b)
        extra = extra_rows_text(context, first, second)
        if extra is None:
            continue
        few, text, reached = extra
        order = rows_by_token(context, "a" if first.rows == few else "b", few)
        if order is not None:
            numbered = _renumbered_table(row.key, (first, second), reached, order)
            pair.drop()
            if numbered is not None:
                found[row.key] = numbered
                continue
        common = np.arange(few)
        x, y = (np.asarray(side.take(common), np.float32) for side in (first, second))
        pair.drop()
        changed = np.any(x != y, axis=1)
        if row.explanation is not None and 0 < changed.mean() < EVERY_ROW:
            continue  # it is known what happened to a few rows
        related = norms.cosine(x, y) if np.isfinite(x).all() and np.isfinite(y).all() else 0.0
        if related <= RELATED:
            continue
        apart = norms.exact_norm(y - x) / (norms.exact_norm(x) or 1.0)
        line = f"{apart:.3g} of the norm, correlation {related:.3g}"
        said = f"{text}; those that both have "
        said += "belong to each other" if changed.any() else "are equal"
        found[row.key] = make_finding("derived", (row.key,), (said, line), apart, None, None)
    return found


def _renumbered_table(
    key: str, sides: tuple[RowReader, RowReader], reached: str, order: NDArray[np.int64]
) -> Finding | None:
    """Return the finding on a table whose tokens have other ids in the longer one; None if neither.

    `sides` are A's and B's tables of the tensor `key`. `reached` says what the longer one's further
    rows are for. order[i] is the longer one's row of the token of row i of the shorter one, or -1.
    Rows that moved with their tokens are a vocabulary that was cut; rows that stayed are other
    tokens'.
    """
    short, long = sides if sides[0].rows < sides[1].rows else sides[::-1]
    label, other = ("A", "B") if short is sides[0] else ("B", "A")
    known = np.flatnonzero(order >= 0)
    moved = known[order[known] != known]
    own = np.asarray(short.take(moved), np.float32)
    by_id, by_token = (np.asarray(long.take(at), np.float32) for at in (moved, order[moved]))
    told = np.any(by_id != by_token, axis=1)  # rows in which the two differ
    if not told.any():
        return None
    own, by_id, by_token = own[told], by_id[told], by_token[told]
    size = norms.exact_norm(by_token) or 1.0
    apart = norms.exact_norm(own - by_token) / size
    if np.array_equal(own, by_id):
        steps = np.unique(order[moved] - moved)
        cause = "row_offset" if len(steps) == 1 else "value_order"
        says = (
            f"{len(moved)} rows of {label} are those of other tokens, from row {moved[0]} on: its "
            "tokenizer numbers these tokens anew, and the rows stand at the ids that they have on "
            "the other side"
        )
        return make_finding(cause, (key,), (says,), apart, 0.0, unfitted_proof(own.size))
    x = np.asarray(long.take(order[known]), np.float32)
    y = np.asarray(short.take(known), np.float32)
    related = norms.cosine(x, y) if np.isfinite(x).all() and np.isfinite(y).all() else 0.0
    if related <= RELATED:
        return None
    apart = norms.exact_norm(y - x) / (norms.exact_norm(x) or 1.0)
    said = f"{other} has {long.rows - short.rows} more rows, {reached}; "
    said += "rows of the tokens that both have "
    said += "belong to each other" if apart else "are equal, at other ids"
    line = f"{apart:.3g} of the norm, correlation {related:.3g}"
    return make_finding("derived", (key,), (said, line), apart, None, None)


def _floats_were_trained(
    by_key: Mapping[str, TensorPair], rows: Sequence[TensorDiff], coarse: Set[str]
) -> bool:
    """Return whether the tensors stored as floats on both sides show that B was trained.

    `coarse` are the keys of those that are decoded codes on one side: they count as packed.

    A faulty quantization leaves norms, biases and tables of floats as they are; a training moves
    them with the packed matrices. True where most of them, at least FEW, differ beyond rounding
    and correlate with the other side's; or all matrices among them, at least PAIR, since vectors
    may be frozen. Those that only rounding may have moved do not count.
    """
    floats = [
        row
        for row in rows
        if row.shape_a is not None
        and row.shape_a == row.shape_b
        and row.key not in coarse
        and max(map(storage_noise, (row.encoding_a, row.encoding_b))) <= FINE
        and {row.encoding_a, row.encoding_b} <= UNIT.keys()
        and (row.explanation is None or row.explanation.cause != "rounding" or _is_sure(row))
    ]
    if len(floats) == len(rows):
        return False  # no packed tensor that could be faulty
    matrices = [row for row in floats if len(row.shape_a or ()) > 1]
    enough = max(FEW, NEARLY_ALL * len(floats))
    open_ = [row for row in floats if row.is_unexplained()]
    related = [row for row in open_ if _is_related(by_key[row.key], row)]
    tables = sum(row in related for row in matrices)
    return len(related) >= enough or tables >= max(PAIR, len(matrices))


def _is_related(pair: TensorPair, row: TensorDiff) -> bool:
    """Return whether a differing tensor of floats is a trained copy of the other side's."""
    if row.shape_a is not None and len(row.shape_a) == 1:
        return _vector_change(pair, LIGHT) is not None
    return row.stats is not None and row.stats.cosine > RELATED


def _is_open(row: TensorDiff) -> bool:
    """Return whether a tensor differs and nothing explains it yet, packed or not."""
    return row.is_unexplained() and row.explanation is None


def _is_quantized_copy(row: TensorDiff) -> bool:
    """Return whether a tensor differs from the other side's by its quantization alone."""
    return row.is_rounded or row.verdict == "WITHIN"


def _is_unexplained_float(row: TensorDiff, weak: tuple[str, ...] = ()) -> bool:
    """Return whether a tensor of floats, or nearly so, differs without an explanation.

    Explanations with a cause in `weak` do not count.
    """
    return (
        row.is_unexplained(weak)
        and max(map(storage_noise, (row.encoding_a, row.encoding_b))) <= FINE
    )


def _matrix_change(pair: TensorPair) -> MatrixChange | None:
    """Return how a pair of matrices differs; None if no training can have made the difference.

    None for matrices that are too large or differ in few rows or columns, for codes and indices,
    and for values that are not finite. Of stacked experts only those that differ are measured.
    """
    assert pair.a is not None and pair.b is not None
    if np.prod(pair.a.shape) > SMALL:
        return None
    x, y = pair.a.numpy(), pair.b.numpy()
    if x.dtype.kind in "biuc" or y.dtype.kind in "biuc":
        return None  # codes and indices are not trained
    x, y = (np.asarray(values, np.float32) for values in (x, y))
    experts: tuple[int, ...] = ()
    if x.ndim == 3 and len(x) > 1:
        own = np.any(x != y, axis=(1, 2))
        if own.any() and not own.all():
            experts = tuple(np.flatnonzero(own).tolist())
            x, y = x[own], y[own]
    x, y = (values.reshape(-1, values.shape[-1]) for values in (x, y))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None  # never filled: what the others are does not depend on it
    differs = x != y
    if min(np.any(differs, axis=axis).mean() for axis in (0, 1)) < EVERY_ROW:
        return None  # a few rows or columns have a low rank, too
    del differs
    plain = pair.a.encoding in UNIT and pair.b.encoding in UNIT
    unit = pair_noise(pair.a.encoding, pair.b.encoding, moved=False)
    pruned, of_four = _pruned_share(x, y)
    factored = 0.0 if pruned else _factored_share(x, y)
    norm, cosine = norms.exact_norm(x) or 1.0, norms.cosine(x, y)
    delta = np.subtract(y, x, out=y)  # no third matrix in memory
    rank = 0 if pruned else _difference_rank(delta, unit * norm)
    removed = None if pruned else _removed_direction(pair, x, delta, unit * norm)
    return MatrixChange(
        pair.key,
        rank,
        norms.exact_norm(delta) / norm,
        cosine,
        plain,
        experts,
        pruned,
        of_four,
        factored,
        removed,
    )


def _factored_share(x: "Array", y: "Array") -> float:
    """Return the fraction of the squared distance that factors of rows and columns explain.

    A common factor for all values is removed first. The factors are fitted on a random half of
    the elements and judged on the others.
    """
    at = [np.linspace(0, n - 1, min(n, LOOKED_AT)).astype(np.int64) for n in x.shape]
    if min(map(len, at)) < NARROW:
        return 0.0
    x, y = (np.asarray(values[np.ix_(*at)], np.float64) for values in (x, y))
    half = np.random.default_rng(12).random(x.shape) < 0.5
    square, product = np.where(half, x * x, 0.0), np.where(half, x * y, 0.0)
    row, column = np.ones(len(x)), np.ones(x.shape[1])
    for _ in range(TURNS):
        row = product @ column / np.maximum(square @ column**2, TINY)
        column = row @ product / np.maximum(row**2 @ square, TINY)
    one = product.sum() / max(square.sum(), TINY)
    left, away = (
        norms.exact_norm((y - x * factor)[~half]) for factor in (np.outer(row, column), one)
    )
    return max(0.0, 1 - (left / away) ** 2) if away else 0.0


def _removed_direction(
    pair: TensorPair, x: "Array", delta: "Array", rounding: float
) -> Removal | None:
    """Return the direction of the residual stream that B's matrix lost, wholly or partly; or None.

    B is A - s v v^T A, where A's outputs are the stream (for a table, its rows): the difference
    has rank 1, with v on the stream's side and v^T A on the other. An adapter of rank 1 has
    another vector there. `rounding` is the norm of what rounding may add.
    """
    role = split_key(pair.key)[1]
    if role.startswith(TABLE):
        x, delta = x.T, delta.T
    elif not role.startswith(WRITERS) or pair.a is None:
        return None
    else:  # the matrices of experts side by side
        x, delta = (
            np.concatenate(np.split(values, len(values) // pair.a.shape[-2]), 1)
            for values in (x, delta)
        )
    size = norms.exact_norm(delta)
    if not size > 0:
        return None
    # The largest singular vector, by powers of the difference's square.
    vector = delta[:, int(np.argmax(np.einsum("ij,ij->j", delta, delta)))].astype(np.float64)
    for _ in range(POWERS):
        onward = np.zeros(len(vector))
        for part in _column_pieces(delta):
            onward += part @ (vector @ part)
        vector = onward / (norms.exact_norm(onward) or 1.0)
    along, had = (
        np.concatenate([vector @ part for part in _column_pieces(values)]) for values in (delta, x)
    )
    rest, end = 0.0, 0
    for part in _column_pieces(delta):
        start, end = end, end + part.shape[1]
        rest += norms.exact_norm(part - np.outer(vector, along[start:end])) ** 2
    if rest > max(2 * rounding, 1e-5 * size) ** 2:
        return None
    if norms.cosine(along, had) > -SAME_LINE:
        return None
    return Removal(vector, norms.exact_norm(along) / norms.exact_norm(had))


def _column_pieces(matrix: "Array") -> "Iterator[Array]":
    """Yield the columns of a matrix in order, as float64 [rows, n] of at most WINDOW values."""
    step = max(1, WINDOW // max(1, len(matrix)))
    for start in range(0, matrix.shape[1], step):
        yield matrix[:, start : start + step].astype(np.float64)


def _pruned_share(x: "Array", y: "Array") -> tuple[float, int]:
    """Return (fraction of values set to zero, zeros in each four), both 0 if B is not pruned.

    The second is 0 if fours differ. B is not pruned where another value differs, or where the
    values set to zero were no smaller than the others: lost or unwritten data does not choose the
    small ones.
    """
    step = max(1, WINDOW // x.shape[1])
    fours: set[int] = set()
    count, lost, left, kept = 0, 0.0, 0.0, 0
    for start in range(0, len(x), step):
        here, there = x[start : start + step], y[start : start + step]
        zeroed = (there == 0) & (here != 0)
        if ((here != there) & ~zeroed).any():
            return 0.0, 0
        sizes = np.abs(here, dtype=np.float64)
        count, kept = count + int(zeroed.sum()), kept + int((~zeroed).sum())
        lost, left = lost + float(sizes[zeroed].sum()), left + float(sizes[~zeroed].sum())
        if x.shape[1] % 4 == 0:
            fours.update(np.unique(zeroed.reshape(-1, 4).sum(1)).tolist())
    if not count or not left or lost / count > SMALLER * left / kept:
        return 0.0, 0
    return count / x.size, fours.pop() if len(fours) == 1 else 0


def _difference_rank(delta: "Array", rounding: float) -> int:
    """Return the rank of `delta` without negligible singular values; 0 if it is not low.

    `rounding` is the norm of what rounding may add to `delta`. A difference that is little more
    than that shows the rank by the singular values that rounding cannot make.
    """
    size = norms.exact_norm(delta)
    limit = int(min(MOST_RANK, SHARE * min(delta.shape)))
    if limit < 1 or not 0 < size < np.inf:
        return 0
    allowed = max(2 * rounding / size, 1e-5)
    shorter = delta if delta.shape[1] <= len(delta) else delta.T

    def pieces() -> "Iterator[Array]":
        """Yield `delta` (or its transpose) some rows at a time, divided by its norm.

        So scaled, products of the largest values are finite.
        """
        step = max(1, WINDOW // shorter.shape[1])
        for start in range(0, len(shorter), step):
            yield shorter[start : start + step] / np.float32(size)

    if allowed > 1:
        return 0  # a light training may have a low rank where most of it is rounded away
    if allowed > HIDDEN:
        return _rank_above_rounding(pieces, shorter.shape, rounding / size, limit)
    for tried in dict.fromkeys((min(FIRST, limit), limit)):
        inside = squares_inside(pieces, row_basis(pieces, shorter.shape[1], tried), FULL)
        if inside is None:
            return 0
        squares, missed = inside
        if missed <= allowed:
            break
    if missed > allowed:
        return 0
    # The rank is the number of singular values above rounding.
    tails = tail_norms(np.maximum(np.linalg.eigvalsh(squares)[::-1], 0.0))
    left = np.hypot(np.append(tails[1:], 0.0), missed)
    enough = np.flatnonzero(left <= allowed)
    rank = int(enough[0]) + 1 if enough.size else 0
    return rank if rank <= limit else 0


def _rank_above_rounding(
    pieces: "Pieces", shape: tuple[int, ...], rounding: float, limit: int
) -> int:
    """Return the rank of a matrix without what rounding added to it; 0 if it is not low.

    `pieces` yields the matrix [rows, columns] of this `shape`, of norm 1, some rows at a time. Its
    rounding has at most the norm `rounding`. Rounding is spread evenly: its largest singular value
    follows from its norm. So the others have to be, and an adapter's are clearly above them. 0
    where more than `limit` are.
    """
    inside = squares_inside(pieces, row_basis(pieces, shape[1], limit), 1.0)
    if inside is None:
        return 0
    squares = np.maximum(np.linalg.eigvalsh(inside[0])[::-1], 0.0)
    rest = np.maximum(1.0 - np.cumsum(squares), 0.0) ** 0.5  # without the first, the first two...
    largest = rest * (shape[0] ** -0.5 + shape[1] ** -0.5)  # if what is left is spread evenly
    for rank in range(1, min(limit, len(squares) - 1) + 1):
        bound = largest[rank - 1]
        if squares[rank] <= (EVEN * bound) ** 2:
            clear = squares[rank - 1] > (ABOVE * bound) ** 2
            return rank if clear and rest[rank - 1] <= rounding else 0
    return 0


def _derived_explanations(
    pairs: Mapping[str, TensorPair],
    matrices: Sequence[TensorDiff],
    changes: Sequence[MatrixChange],
    floats_trained: bool = False,
    faults: int = 0,
) -> dict[str, Finding]:
    """Return {tensor key: finding} that B is a training or a merge of A; {} if neither fits.

    `matrices` are all compared matrices without the `faults` ones that have a fault besides the
    training, `changes` those that differ. `floats_trained`: the float tensors show that B
    was trained, though its matrices are packed.
    """
    # One direction lost in all of them is a direction taken out of the stream.
    found = _removal_explanations(changes)
    if found:
        return found
    # One whose sign turned is a fault besides what was done to the others.
    turned = [change for change in changes if change.related < -AKIN]
    if turned and len(turned) < len(changes):
        rest = [change for change in changes if not change.related < -AKIN]
        found = _derived_explanations(pairs, matrices, rest, floats_trained, faults)
        return found and found | {change.key: _negated_explanation(change) for change in turned}
    # Differences of low rank are a merged adapter.
    low = [change for change in changes if change.rank]
    if low and len(low) == len(changes):
        found = _merge_explanations(pairs, matrices, low)
        if found:
            return found
    if not (floats_trained or all(change.plain for change in changes)):
        return {}  # a faulty quantization of all tensors looks like a training
    # Otherwise most must be related to the other side: a training or pruning.
    related = [change for change in changes if change.related > RELATED]
    if len(related) < 0.9 * len(changes):
        return {}
    keys = [change.key for change in changes]
    # What a training did may be less than the rounding of a coarse type.
    hidden = floats_trained and sum(_is_quantized_copy(row) for row in matrices)
    cause, file = "derived", _whole_files_clause(pairs, matrices, keys)
    if len(changes) >= max(FEW, NEARLY_ALL * (len(matrices) - hidden)):
        where = file and file + _OR_TRAINED
    elif not floats_trained and any(
        _is_open(row) and not _is_unexplained_float(row) for row in matrices
    ):
        return {}  # packed ones differ as well: no part alone
    elif _is_trained_part({row.key for row in matrices}, keys):
        where = f": {short_keys(keys)} alone{file}{file and _OR_TRAINED}"
    elif file:  # no training ends where a file does
        where, cause = file, "stale_tensor"
    else:
        return {}
    sizes = sorted(change.size for change in changes)
    if any(change.experts for change in changes):
        where += f"{',' if where else ':'} {_differing_experts(changes)} alone"
    least = floor_text(min(change.related for change in related))
    text = (
        f"{len(changes)} of {len(matrices) + faults} matrices differ"
        f"{' by more than their quantization' if hidden else ''}, by {sizes[0]:.2g} to "
        f"{sizes[-1]:.2g} of their norm, and belong to those of the other side "
        f"(correlation {least}): {_training_words(changes)}{where}"
    )
    return {change.key: _derived_explanation(change, text, cause) for change in changes}


def _whole_files_clause(
    pairs: Mapping[str, TensorPair], matrices: Sequence[TensorDiff], keys: Sequence[str]
) -> str:
    """Return "; ..." if the differing matrices are exactly all those of some files of a model.

    It names the files, and says that files of two states were mixed. `keys` are those of the
    differing matrices. "" where a file holds differing and equal ones, or no other file is left.
    """
    own = set(keys)
    for label in ("b", "a"):
        files = _files_of_tensors(pairs, (row.key for row in matrices), label)
        there = {name for key in own for name in files[key]}
        others = {name for key, names in files.items() if key not in own for name in names}
        if there and others and there.isdisjoint(others):
            held = f"{', '.join(sorted(there))} of {label.upper()}"
            return (
                f"; they are all matrices of {held}, and none of the other files differs: "
                "files of two states were mixed"
            )
    return ""


def floor_text(related: float) -> str:
    """Return "at least" and a correlation, rounded down so that only equal values have 1."""
    return f"at least {math.floor(1e4 * related) / 1e4:g}"


def _training_words(changes: Sequence[MatrixChange]) -> str:
    """Return in words what was done to all changed matrices: trained further, scaled or pruned."""
    factored = min(change.factored for change in changes)
    if factored >= FACTORED:
        return (
            f"rows and columns have factors of their own, which make {math.floor(100 * factored)} "
            "% of the squared difference or more, as no training does; an adapter's magnitudes "
            "(DoRA) do that are merged, or taken out along another axis"
        )
    if not all(change.pruned for change in changes):
        return "trained further"
    fours = {change.of_four for change in changes}
    if len(fours) == 1 and fours != {0}:
        return f"pruned, {fours.pop()} of every 4 values are zero and all others equal"
    shares = sorted(math.floor(1000 * change.pruned) / 10 for change in changes)
    share = f"{shares[0]:g}" if shares[0] == shares[-1] else f"{shares[0]:g} to {shares[-1]:g}"
    return f"pruned, {share} % of the values are zero, small ones, and all others equal"


def _differing_experts(changes: Sequence[MatrixChange]) -> str:
    """Return in words which experts of each layer differ."""
    found: dict[int | None, set[int]] = {}
    for change in changes:
        found.setdefault(split_key(change.key)[0], set()).update(change.experts)
    same = len({tuple(sorted(experts)) for experts in found.values()}) == 1
    said = {
        layer: f"expert{'s' if len(experts) > 1 else ''} {', '.join(map(str, sorted(experts)))}"
        for layer, experts in found.items()
    }
    if same:
        return next(iter(said.values()))
    return "; ".join(f"{words} of layer {layer}" for layer, words in said.items())


def _is_trained_part(every: Set[str], keys: Sequence[str]) -> bool:
    """Return whether `keys` are the weights that a training of some roles and layers changes.

    True where they are every matrix of some roles in some layers, at least FEW, as one or two are
    rather a fault. `every` are the keys of all matrices. A token table or head may be among them,
    or be all that changed.
    """
    placed = [split_key(key) for key in keys]
    layers = {layer for layer, _ in placed if layer is not None}
    roles = {role for layer, role in placed if layer is not None}
    tables = {role for layer, role in placed if layer is None}
    if not tables <= TABLES:
        return False
    if not layers:
        return bool(tables)
    whole = {key for key in every if split_key(key)[0] in layers and split_key(key)[1] in roles}
    own = {key for key in keys if split_key(key)[0] is not None}
    return own == whole and len(own) >= FEW


def _derived_explanation(change: MatrixChange, text: str, cause: str = "derived") -> Finding:
    """Return the finding of one matrix that training changed, with its rank and correlation."""
    rank = f"rank {change.rank}, " if change.rank else ""
    line = f"{rank}{change.size:.3g} of the norm, correlation {change.related:.3g}"
    return make_finding(cause, (change.key,), (text, line), change.size, None, None)


def _negated_explanation(change: MatrixChange) -> Finding:
    """Return the finding of one matrix that correlates with the negated one of the other side."""
    text = "the sign is turned, in addition to what was done to all the others"
    line = f"correlation {change.related:.3g}"
    return make_finding(
        "scale", (change.key,), (text, line), change.size, None, None, confirmed=False
    )


def _removal_explanations(changes: Sequence[MatrixChange]) -> dict[str, Finding]:
    """Return {tensor key: finding} that all changed matrices lost one stream direction; or {}.

    An adapter's matrices would each have another direction.
    """
    lost = [change.removed for change in changes if change.removed is not None]
    if len(lost) < max(PAIR, len(changes)):
        return {}
    first = lost[0].direction
    if any(one.direction.shape != first.shape for one in lost):
        return {}
    least = min(abs(float(one.direction @ first)) for one in lost)
    if least < SAME_LINE:
        return {}
    sizes = sorted(change.size for change in changes)
    shares = sorted(one.share for one in lost)
    if max(abs(share - 1) for share in shares) <= WHOLE:
        what = "one direction of the stream was removed"
    else:
        what = f"{shares[0]:.2g} to {shares[-1]:.2g} of one direction of the stream was removed"
    text = (
        f"{what} from {len(changes)} matrices that write to it: B - A has rank 1, {sizes[0]:.2g} "
        f"to {sizes[-1]:.2g} of the norm, with the same vector on the stream's side in all (cosine "
        f"{floor_text(least)}), times what A has along it"
    )
    return {change.key: _derived_explanation(change, text) for change in changes}


def _merge_explanations(
    pairs: Mapping[str, TensorPair], matrices: Sequence[TensorDiff], low: Sequence[MatrixChange]
) -> dict[str, Finding]:
    """Return {tensor key: finding} of a merged adapter: low-rank changes of all or some targets."""
    keys, in_order = {change.key for change in low}, [change.key for change in low]
    roles = {split_key(key)[1] for key in keys}
    targets = {row.key for row in matrices if split_key(row.key)[1] in roles}
    ranks = sorted({change.rank for change in low})
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    sizes = sorted(change.size for change in low)
    size = f"{sizes[0]:.2g} to {sizes[-1]:.2g} of the norm"
    # All targets differ: a merge into one side.
    if keys == targets:
        text = (
            f"B - A has {rank} in every {short_keys(in_order)}, {size}, and nothing else of "
            f"the kind "
            "differs: an adapter was merged into one side (or once more than into the other)"
        )
        return {change.key: _derived_explanation(change, text, "lora_merge") for change in low}
    # Just the targets of some files differ: a merge into a shard.
    for label in ("b", "a"):
        shards = _files_of_tensors(pairs, targets, label)
        own = {shard for key in keys for shard in shards[key]}
        others = {shard for found in shards.values() for shard in found} - own
        if own and others and {key for key in targets if shards[key] <= own} == keys:
            text = (
                f"B - A has {rank}, {size}, in all {len(keys)} of {', '.join(sorted(roles))} in "
                f"{', '.join(sorted(own))}, and is zero in {', '.join(sorted(others))}: an adapter "
                "was merged into one side's shard only"
            )
            return {change.key: _partial_merge_explanation(change, text, True) for change in low}
    # Some other part of the targets differs. One matrix is no run of layers.
    left = sorted(targets - keys)
    sure = len(keys) >= PAIR and _is_run_of_layers(targets, keys)
    text = (
        f"B - A has {rank}, {size}, in {short_keys(sorted(keys))}, and is zero in "
        f"{short_keys(left)}: an adapter "
    )
    if not sure and (len(keys) < PAIR or len(keys) < NEARLY_ALL * len(targets)):
        text += "made for these alone was merged, or one was merged into few of its targets"
        return {change.key: _derived_explanation(change, text, "lora_merge") for change in low}
    text += "merged into some of its targets, or made for these alone"
    return {change.key: _partial_merge_explanation(change, text, sure) for change in low}


def _is_run_of_layers(targets: Iterable[str], keys: set[str]) -> bool:
    """Return whether `keys` are all targets of the first or last layers, as one shard has them.

    `targets` are the keys of all tensors of the merged roles.
    """
    layers: dict[int, set[str]] = {}
    for key in targets:
        layer, _ = split_key(key)
        if layer is None:
            return False
        layers.setdefault(layer, set()).add(key)
    whole = sorted(layer for layer, own in layers.items() if own <= keys)
    touched = sorted(layer for layer, own in layers.items() if own & keys)
    every = sorted(layers)
    return whole == touched and whole in (every[: len(whole)], every[-len(whole) :])


def _partial_merge_explanation(change: MatrixChange, text: str, sure: bool) -> Finding:
    """Return the finding of one matrix of a merge that changed only some of its targets.

    `text` is its first line of evidence. `sure`: the finding is confirmed.
    """
    line = f"rank {change.rank}, {change.size:.3g} of the norm"
    return make_finding(
        "partial_merge", (change.key,), (text, line), change.size, 0.0, None, confirmed=sure
    )


def _files_of_tensors(
    pairs: Mapping[str, TensorPair], keys: Iterable[str], label: str
) -> dict[str, set[str]]:
    """Return {tensor key: names of the files that hold it} of a side, "a" or "b"."""
    found: dict[str, set[str]] = {}
    for key in keys:
        side = pairs[key].a if label == "a" else pairs[key].b
        stored = () if side is None else side.stored
        found[key] = {tensor.path.name for tensor in stored if tensor.path is not None}
    return found


def _explain_vectors_alone(
    by_key: Mapping[str, TensorPair], rows: Sequence[TensorDiff]
) -> dict[str, Finding]:
    """Return {tensor key: finding} if only vectors were trained (norms or biases); else {}.

    All vectors of some kinds in some layers differ, nothing else does without an explanation, no
    simple function of A's vector gives B's, and the two correlate after the mean of each is
    subtracted (norms are all near one, and would correlate without that).
    """
    vectors = [
        row
        for row in rows
        if row.shape_a is not None and len(row.shape_a) == 1 and row.shape_a == row.shape_b
    ]
    open_ = [row for row in vectors if _is_unexplained_float(row)]
    keys = [row.key for row in open_]
    every = {row.key for row in vectors}
    whole = _is_trained_part(every, [key for key in keys if split_key(key)[0] is not None])
    if (
        len(open_) < FEW
        or not whole
        or any(row.is_unexplained() for row in rows if row not in open_)
    ):
        return {}
    found = [_vector_change(by_key[key]) for key in keys]
    changes = [change for change in found if change is not None]
    if len(changes) < len(open_):
        return {}
    sizes = sorted(change.size for change in changes)
    text = (
        f"{len(changes)} vectors differ, by {sizes[0]:.2g} to {sizes[-1]:.2g} of their norm, and "
        f"belong to those of the other side (correlation "
        f"{floor_text(min(c.related for c in changes))}"
        f"): trained further: {short_keys(keys)} alone"
    )
    return {change.key: _derived_explanation(change, text) for change in changes}


def _vector_change(pair: TensorPair, least: float = EVERY_ROW) -> MatrixChange | None:
    """Return how a pair of vectors differs; None if training cannot be told from other causes.

    None for short, quantized or mostly equal vectors (less than the fraction `least` differs),
    unrelated ones, and a difference that is proportional to the values or nearly constant.
    """
    assert pair.a is not None and pair.b is not None
    plain = pair.a.encoding in UNIT and pair.b.encoding in UNIT
    x, y = (np.asarray(side.numpy()).reshape(-1) for side in (pair.a, pair.b))
    pair.drop()
    if not plain or x.size < LEAST or x.dtype.kind != "f" or y.dtype.kind != "f":
        return None
    x, y = (values.astype(np.float64) for values in (x, y))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    delta = y - x
    if np.mean(delta != 0) < least:
        return None
    apart = [values - values.mean() for values in (x, y, delta)]
    related, follows = norms.cosine(apart[0], apart[1]), norms.cosine(apart[0], apart[2])
    lifted = abs(float(delta.mean())) > MOVED * float(np.abs(delta).mean())
    if related < AKIN or abs(follows) > MOVED or lifted:
        return None  # of another checkpoint; or a function of the values, or a number added
    size = norms.exact_norm(delta) / (norms.exact_norm(x) or 1.0)
    return MatrixChange(pair.key, 0, size, related, plain)


def _vector_explanations(rows: Sequence[TensorDiff], like: Finding) -> dict[str, Finding]:
    """Return {tensor key: a copy of finding `like`} for each unexplained vector that differs.

    Vectors within the rounding of their largest value, though not of their own, are included.
    """
    return {
        row.key: replace(
            like,
            where=(row.key,),
            evidence=like.evidence[:1],
            residual_before=None if row.stats is None else row.stats.rel_l2,
        )
        for row in rows
        if row.shape_a is not None
        and len(row.shape_a) == 1
        and _is_unexplained_float(row, () if _is_sure(row) else ("rounding",))
    }


def _is_sure(row: TensorDiff) -> bool:
    """Return whether a tensor has an explanation whose proof confirms it."""
    return row.explanation is not None and row.explanation.certainty == "confirmed"


HYPOTHESES = (
    JointHypothesis(
        _CAUSES, whole_model, 450, "says only that both belong together, at last", tables=True
    ),
)
