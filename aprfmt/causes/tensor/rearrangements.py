"""Hypotheses that elements were moved: transposed, rows or columns reordered, heads repeated.

A *line* is a row or a column, and a *block* equally many lines, such as those of a head. A *side*
is the tensor of file A or of file B. A *guess* is a change of one tensor of a pair after which both
should be equal.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.layout_steps import RowsPermuted
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.sequences import join_moves
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor import permutation, row_sources
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis, Take
from aprfmt.causes.tensor.own_parts import moved_parts
from aprfmt.causes.tensor.permutation import FoundLines
from aprfmt.causes.tensor.token_tables import is_longer_table
from aprfmt.causes.tensor.transposition import guess_transposed_inside, samples_agree
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "transpose", "tensor", "bug",
        "A matrix stored or read with rows and columns exchanged.",
        "Equal multiset of values; shapes exchanged, or a square matrix that differs off the "
        "diagonal.",
        "The transposed matrix equals the other side's.",
    ),
    Cause(
        "head_order", "tensor", "bug",
        "Whole attention heads stand in another order.",
        "Equal multiset of blocks of head_dim rows.",
        "Putting the heads in the printed order makes the tensors equal.",
    ),
    Cause(
        "rope_pairing", "tensor", "bug",
        "Rope turns adjacent elements where the weights are laid out for split halves, or the "
        "other way round.",
        "q and k are equal before rope and differ after it; position 0 is equal and the rotated "
        "vectors have equal length. In tensors: rows permuted inside each head.",
        "Rope with the other pairing, or the rows permuted back, makes the difference vanish.",
        keys=("rope_style",),
    ),
    Cause(
        "gqa_mapping", "forward", "bug",
        "Query heads read the wrong key and value heads, or rows were permuted with the wrong "
        "head count.",
        "q, k and v are equal; scores of some heads differ while others are equal.",
        "Attention with the named mapping of heads makes the difference vanish.",
        keys=("n_heads", "n_kv_heads", "head_dim", "value_head_dim", "global_head_dim",
              "global_kv_heads", "delta_key_heads",
              "delta_value_heads"),
    ),
    Cause(
        "expert_order", "tensor", "bug",
        "The experts of a layer stand in another order than their router's rows.",
        "Equal multiset of experts.",
        "Putting the experts in the printed order makes the stack equal.",
    ),
)  # fmt: skip

TRANSPOSED = 1 << 27  # elements up to which a matrix is decoded whole to be transposed
ALONG = 16  # values along a row up to which a shift is looked for
ROTATED = ("attn_q", "attn_k")  # roles whose rows rope turns
_PAIRS = {"half": "split halves", "interleaved": "adjacent pairs", "none": "nothing"}
# Of latent attention, whose rotated rows stand apart from these.
UNROTATED = ("attn_kv_b", "attn_q_a")
# In names of tensors of an architecture that is not known: rope turns none of these.
NEVER_ROTATED = ("embed", "position", "norm", "mlp", "ffn", "feed_forward", ".fc", "expert", "conv")
BLOCKS = (16, 32, 64, 256)  # values a block of some encoding has
NORMS = 1e-4  # relative difference of two norms that a rearrangement of floats never makes


def guess_transposed(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that rows and columns are exchanged, in the data or only in the shape."""
    a, b = case.a, case.b
    if len(a.shape) < 2 or a.shape[:-2] != b.shape[:-2] or a.size > TRANSPOSED:
        return
    # Equal shapes: the values alone may be transposed.
    if a.shape[-2:] != b.shape[:-3:-1]:
        if a.shape == b.shape:
            yield from guess_transposed_inside(case)
        return
    # Exchanged shapes: compare a corner of both first.
    few = min(8, *a.shape[-2:])
    at_a = np.linspace(0, a.shape[-2] - 1, few).astype(np.int64)
    at_b = np.linspace(0, b.shape[-2] - 1, few).astype(np.int64)
    corner_a, corner_b = a.take(at_a)[:, at_b], b.take(at_b)[:, at_a]
    slack = case.slack()
    if samples_agree(corner_a, corner_b.T, slack):
        yield case.guess(
            "transpose",
            ("B's matrix is A's with rows and columns exchanged",),
            "B",
            lambda rows: b.whole.reshape(b.shape).swapaxes(-1, -2).reshape(a.rows, a.columns)[rows],
        )
    if a.shape == b.shape:
        yield from guess_transposed_inside(case)
        return
    # Or only the shape is exchanged, and the values keep their order.
    width = min(a.columns, b.columns)
    first = np.zeros(1, np.int64)
    if samples_agree(a.take(first)[:, :width], b.take(first)[:, :width], slack):
        says = (
            "the values stand in the same order under the exchanged shape: only the shape, and "
            "so the reading of it, differs"
        )
        yield case.guess(
            "transpose", (says,), "B", lambda rows: b.whole.reshape(a.rows, a.columns)[rows]
        )


def guess_rearranged(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses of another order of rows, then of columns.

    The order may be of rope pairs, heads or experts, a shift, or any.
    """
    if case.a.rows != case.b.rows or case.a.columns != case.b.columns:
        return
    ratio = case.before.norms
    if abs(ratio[0] - ratio[1]) > (NORMS + 2 * case.slack()) * max(ratio):
        return  # rearranging values does not change their norm
    yield from _guess_expert_order(case)
    yield from _guess_own_parts(case)
    for find in (permutation.find_rows, permutation.find_columns):
        found = find(case)
        if found is not None and bool((found.index != found.at).any()):
            yield from _name_rearrangement(case, found)


def _name_rearrangement(case: DifferingPair, found: FoundLines) -> Iterator[Guess]:
    """Yield guesses on the cause of a rearrangement that was found, likely ones first."""
    # Whole blocks, then a shift.
    enough = len(found.index) >= permutation.FOUND * found.count or found.count > len(found.index)
    what = "rows" if found.axis == 0 else "columns"
    if case.a.columns == 1:
        what = "values"
    whole = found.is_complete and enough and len(set(found.at.tolist())) == found.count
    if whole:
        yield from _guess_blocks(
            case, found, what
        )  # for two heads an exchange is also a shift by one
    k = permutation.constant_shift(found)
    if k is not None and found.count > 2:
        yield from _guess_shift(case, found, k, what)
    # The inputs of a matrix are no heads, whatever a block of them looks like.
    if whole and found.axis == 1:
        yield from _guess_inside_blocks(case, found)
    # Orders that rope pairs explain, for the right and for a wrong head count.
    unrotated = case.role.startswith(UNROTATED)
    unknown = not case.context.hyper and not any(part in case.key for part in NEVER_ROTATED)
    rotated = not unrotated and (case.role.startswith(ROTATED) or unknown)
    for heads, way, p in permutation.rope_pair_permutations(case, found) if rotated else ():
        yield _pairing_guess(case, found, heads, way, p, what)
        break
    right = expected_heads(case, found.count)
    for _, words, p in (
        permutation.regrouped_orders(case, found, right) if rotated and right else ()
    ):
        text = f"{what} reordered with the wrong head count: adjacent pairs {words}"
        yield _permutation_guess("gqa_mapping", (text,), case, found.axis, p)
        break
    # Parts dealt out in turn; equal lines leave their own order open.
    if enough:
        sizes = case.sizes("head_dim", "value_head_dim") if found.axis == 0 else []
        for text, p in permutation.dealt_orders(found, sizes):
            order = (f"B has A's {what} in another order: {text}",)
            yield replace(_permutation_guess("value_order", order, case, found.axis, p), free=1)
            break
    if not whole:
        return
    # At last any order, by its first moves.
    moved = found.index[found.index != found.at]
    moves = list(zip(moved.tolist(), found.at[moved].tolist(), strict=True))
    pairs = join_moves(moves, 4, case.row_name if found.axis == 0 else str)
    text = f"B has A's {what} in another order"
    told = (text, f"{len(moved)} of {found.count} {what} moved: {pairs}")
    yield _permutation_guess("row_offset", told, case, found.axis, found.at)


def _guess_own_parts(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that the parts of a role's rows are in another order, in each head or all."""
    found = moved_parts(case)
    if found is not None:
        words, p = found
        yield _permutation_guess("fused_order", (words,), case, 0, p)


def _permutation_guess(
    cause: str, says: tuple[str, ...], case: DifferingPair, axis: int, p: "Array"
) -> Guess:
    """Return the guess that row (or column, `axis` 1) i of A is p[i] of B."""
    b = case.b
    right = _take_in_order(b, p) if axis == 0 else (lambda rows: b.take(rows)[:, p])
    return case.guess(cause, says, "B", right, free=_order_numbers(case, p))


def _order_numbers(case: DifferingPair, p: "Array") -> int:
    """Return how many free numbers an order of lines has; 0 if the values themselves prove it.

    A line is a row or column. Of a vector, values that mostly occur only once prove the order.
    """
    moved = np.flatnonzero(p != np.arange(len(p)))
    if case.a.size > len(p):
        return len(moved)
    values = case.b.whole.reshape(-1)[moved]
    return 0 if 2 * len(np.unique(values)) >= len(values) else len(moved)


def _take_in_order(reader: RowReader, p: "Array") -> Take:
    """Return a function from row numbers i to the rows p[i] of a tensor."""
    return lambda rows: reader.take(p[rows])


def take_rows_from(reader: RowReader, start: int) -> Take:
    """Return a function from row numbers i to the rows start + i of a tensor."""
    return lambda rows: reader.take(rows + start)


def _guess_shift(case: DifferingPair, found: FoundLines, k: int, what: str) -> Iterator[Guess]:
    """Yield guesses that all lines are shifted by `k`, with and without wrap-around.

    `what` names the lines, such as "rows".
    """
    one = what.removesuffix("s")
    around = (np.arange(found.count) + k) % found.count
    text = f"{one} i of A is {one} i{k:+d} of B"
    yield _permutation_guess(
        "row_offset", (text, f"the last {abs(k)} come round"), case, found.axis, around
    )
    if found.axis == 0:
        rows = np.arange(max(0, -k), found.count - max(0, k))
        says = text, f"{len(rows)} of {found.count} {what} are equal there"
        yield case.guess("row_offset", says, "B", take_rows_from(case.b, k), rows=rows)


def guess_value_offset(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that values are shifted along their rows, for any encodings."""
    x, y = case.sample_a, case.sample_b
    width = case.a.columns
    if width < 4 * ALONG or x.shape != y.shape:
        return
    slack = case.slack() or 0.0
    for k in (sign * step for step in range(1, ALONG + 1) for sign in (1, -1)):
        if not samples_agree(_shift_columns(x, k)[:4], _shift_columns(y, -k)[:4], slack):
            continue
        yield Guess(
            "byte_offset",
            (
                f"value i of B is value i{k:+d} of A, in every row",
                f"{width - abs(k)} of {width} values of a row are compared there",
            ),
            _take_shifted(case.a, k),
            _take_shifted(case.b, -k),
            rows=np.arange(case.a.rows),
            slack=slack,
        )
        return


def _shift_columns(x: "Array", k: int) -> "Array":
    """Return the columns of `x` without the first k (k > 0), or without the last -k (k < 0)."""
    return x[:, max(0, k) : x.shape[1] + min(0, k)]


def _take_shifted(reader: RowReader, k: int) -> Take:
    """Return a function from row numbers to rows without their first k (or last -k) values."""
    return lambda rows: _shift_columns(reader.take(rows), k)


def _wanted_pairs_clause(case: DifferingPair, way: str) -> str:
    """Return "; NAME rotates ..." on the rope pairing that architecture NAME expects in q and k.

    `way` says in words the pairings of A and B. If A's is not the expected one, the clause adds
    which side may be wrong. "" for an unknown architecture.
    """
    wanted = _PAIRS.get(case.context.rotated_pairs(split_key(case.key)[0]), "")
    if not wanted:
        return ""
    name = case.context.models["a"].spec.name
    if wanted == "nothing":
        return f"; {name} has no rope and wants q and k in one order"
    said = f"; {name} rotates {wanted}"
    if way.startswith(wanted):
        return said
    # One step from pairs to halves, which A's order does not need.
    steps = () if case.b.side.group is None else case.b.side.group.binding.steps
    if any(isinstance(step, RowsPermuted) for step in steps):
        return f"{said}, {case.context.models['b'].format} stores adjacent pairs"
    return f"{said}: A is wrong, or the rows of B were reordered once too often"


def expected_heads(case: DifferingPair, count: int) -> int | None:
    """Return the number of heads in `count` rows of this role; None if the sizes do not say."""
    role = case.role
    names = ("n_kv_heads",) if role.startswith(("attn_k", "attn_v")) else ("n_heads",)
    told = case.sizes(*names)
    return told[0] if role.startswith("attn_") and told and count % told[0] == 0 else None


def _pairing_guess(
    case: DifferingPair, found: FoundLines, heads: int, way: str, p: "Array", what: str
) -> Guess:
    """Return the guess that the rows of each head were put into another rope pairing by order `p`.

    `way` says the two pairings in words, `what` names the lines, such as "rows". If `heads` is not
    the model's number of heads, the guess is a wrong head count.
    """
    right = expected_heads(case, found.count)
    if right is None or right == heads:
        what = "rows" if what == "values" else what  # of a bias, whose weight has rows
        text = f"{what} of each head: {way}{_wanted_pairs_clause(case, way)}"
        says = (text, f"{heads} heads of {found.count // heads} {what}")
        return _permutation_guess("rope_pairing", says, case, found.axis, p)
    text = f"{what} of each head: {way}"
    says = (
        f"{what} of each head reordered with the wrong head count: {way}",
        f"as if there were {heads} heads of {found.count // heads} {what}; there are {right} of "
        f"{found.count // right}",
    )
    return _permutation_guess("gqa_mapping", says, case, found.axis, p)


def _guess_blocks(case: DifferingPair, found: FoundLines, what: str) -> Iterator[Guess]:
    """Yield the guess that whole blocks of lines, such as heads, are in another order.

    `what` names the lines, such as "rows".
    """
    if case.role.startswith(("ffn_gate_inp", "exp_probs_b")) and found.axis == 0:
        yield _block_order_guess(case, found, found.at, 1, "expert_order", "the router's experts")
        return
    if not case.role.startswith("attn_"):
        return
    # Sizes that a head may have.
    right = expected_heads(case, found.count)
    counts = case.sizes("n_heads", "n_kv_heads") if right is None else [right]
    dims = case.sizes("head_dim") if right is None else []
    # A block smaller than the role's own head is no head: rows were permuted for another number.
    for size in dict.fromkeys((*dims, *(found.count // heads for heads in counts))):
        q = permutation.block_permutation(found, size)
        if q is None:
            continue
        for kv in case.sizes("n_kv_heads"):
            if len(q) % kv or kv in (1, len(q)):
                continue
            grouped = np.arange(len(q)).reshape(kv, -1).T.reshape(-1)
            for turned in (grouped, permutation.invert_permutation(grouped)):
                if np.array_equal(q, turned):
                    says = (
                        "query heads grouped the other way: head h belongs to key head h mod "
                        f"{kv} on one side, to h div {len(q) // kv} on the other",
                        f"{len(q)} heads of {size} {what}, {kv} key heads",
                    )
                    yield _permutation_guess(
                        "gqa_mapping", says, case, found.axis, permutation.expand_blocks(q, size)
                    )
                    return
        yield _block_order_guess(case, found, q, size, "head_order", "heads")
        return


def _guess_expert_order(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that a stack's experts are in another order, found by their first rows."""
    if len(case.shape) != 3 or case.numbers is not None:
        return
    count, size = case.shape[0], case.shape[1]
    first = np.arange(count) * size
    found = row_sources.match_rows(case.a.take(first), case.b.take(first), case.slack())
    if bool((found < 0).any()) or len(set(found.tolist())) != count:
        return
    if bool((found != np.arange(count)).any()):
        whole = FoundLines(
            np.arange(case.a.rows), permutation.expand_blocks(found, size), case.a.rows, 0
        )
        yield _block_order_guess(case, whole, found, size, "expert_order", "experts")


def _guess_inside_blocks(case: DifferingPair, found: FoundLines) -> Iterator[Guess]:
    """Yield the guess that columns are reordered in every block alike, as by misread nibbles."""
    for size in (size for size in BLOCKS if found.count % size == 0 and found.count > size):
        inside = found.at.reshape(-1, size) - found.index.reshape(-1, size)
        if not bool((inside == inside[0]).all()):
            continue
        order = (found.at[:size]).tolist()
        shown = ", ".join(map(str, order[:8]))
        says = (
            f"the values of every block of {size} stand in another order, as where the nibbles of "
            "a block were read the wrong way",
            f"the first values of a block in A are these of B: {shown} ...",
        )
        yield _permutation_guess("endianness", says, case, found.axis, found.at)
        return


def _block_order_guess(
    case: DifferingPair, found: FoundLines, q: "Array", size: int, cause: str, what: str
) -> Guess:
    """Return the guess that block b of A is block q[b] of B, for blocks of `size` lines.

    `what` names the blocks, such as "heads".
    """
    shown = ", ".join(str(i) for i in q[:16].tolist()) + (" ..." if len(q) > 16 else "")
    text = f"{what} stand in another order"
    by_text = sorted(range(len(q)), key=str)
    if len(q) > 10 and by_text in (q.tolist(), np.argsort(q).tolist()):
        side = "B" if np.argsort(q).tolist() == by_text else "A"
        text = f"{what} of {side} are sorted as text: 0, 1, 10, 11, ..., 2"
    says = (text, f"{what} 0, 1, 2, ... of A are these of B: {shown}")
    return _permutation_guess(cause, says, case, found.axis, permutation.expand_blocks(q, size))


def guess_repeated_heads(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that one side repeats every key or value head (shapes differ)."""
    a, b = case.a, case.b
    if len(a.shape) > 2 or len(a.shape) != len(b.shape) or a.columns != b.columns:
        return
    if a.columns == 1 and len(a.shape) == 2:
        return
    small, other, large, label = (a, "A", b, "B") if a.rows < b.rows else (b, "B", a, "A")
    if small.rows == 0 or large.rows % small.rows or not case.role.startswith(("attn_k", "attn_v")):
        return
    # Try both orders of the repeated heads.
    times = large.rows // small.rows
    for size in case.sizes("head_dim"):
        if small.rows % size:
            continue
        heads = small.rows // size
        every = np.arange(large.rows)
        head, inside = every // size, every % size
        for how, source in (("in a row", head // times), ("in turn", head % heads)):
            says = f"{label} has each of the {heads} heads {times} times, {how}"
            yield case.guess(
                "gqa_mapping",
                (says,),
                other,
                _take_in_order(small, source * size + inside),
                rows=every,
            )
        return


def guess_row_range(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that one side is some consecutive rows of the other (shapes differ).

    The first rows of a longer token table are no such range: its other rows are for other ids.
    """
    a, b = case.a, case.b
    if a.columns != b.columns or a.columns == 1 or a.rows == b.rows:
        return
    small, other, large, label = (a, "A", b, "B") if a.rows < b.rows else (b, "B", a, "A")
    probe = small.take(np.array([0, small.rows // 2, small.rows - 1]))
    step = max(1, (1 << 20) // max(1, large.columns))
    for start in range(0, large.rows - small.rows + 1, step):
        rows = np.arange(start, min(large.rows - small.rows + 1, start + step))
        near = np.abs(large.take(rows)[:, :8] - probe[0][None, :8]).max(axis=1)
        limit = 2 * case.slack() * float(np.abs(probe[0]).max()) + 0.0
        for at in rows[near <= limit].tolist():
            if at == 0 and is_longer_table(case.context, case.key, a, b):
                continue
            says = (
                f"{other}'s {small.rows} rows are rows {at} to {at + small.rows - 1} of "
                f"{label}, which has {large.rows}"
            )
            yield case.guess(
                "row_offset", (says,), label, take_rows_from(large, at), rows=np.arange(small.rows)
            )
            return


HYPOTHESES = (
    PairHypothesis(
        ("transpose",),
        guess_transposed,
        150,
        "one known order, before any order of rows",
        shapes=True,
    ),
    PairHypothesis(
        (
            "rope_pairing",
            "gqa_mapping",
            "head_order",
            "expert_order",
            "row_offset",
            "fused_order",
            "value_order",
        ),
        guess_rearranged,
        190,
        "any order of rows or columns, the known ones first",
        part=True,
    ),
    PairHypothesis(
        ("byte_offset",), guess_value_offset, 250, "seen through an encoding: needs a bound"
    ),
    PairHypothesis(
        ("gqa_mapping",),
        guess_repeated_heads,
        320,
        "other shapes, a repeated part first",
        shapes=True,
    ),
    PairHypothesis(
        ("row_offset",), guess_row_range, 330, "other shapes, a part that was cut", shapes=True
    ),
)
