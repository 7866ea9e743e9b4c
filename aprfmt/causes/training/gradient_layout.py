"""Gradients whose elements are in another order, or that lack those of some heads or experts.

A *block* is one of equally many rows, or columns, of a gradient: those of a head, of an expert, or
of a rank's shard.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.causes.training.gradient_case import GradientCase, GradientGuess, GradientHypothesis
from aprfmt.causes.training.optimizers import F64

CAUSE_ROWS = (
    Cause(
        "gradient_transposed",
        "gradient",
        "bug",
        "The gradient is transposed, under the shape of the weight.",
        "Its elements in the other order are the computed ones.",
        "The computed gradient transposed gives every element.",
    ),
    Cause(
        "gradient_order",
        "gradient",
        "bug",
        "Blocks of a gradient stand in another order: shards that were put together wrongly, or "
        "heads whose rows are interleaved in one layout and not in the other.",
        "Each block is the computed one of another place.",
        "The computed gradient in that order gives every element.",
    ),
    Cause(
        "gradient_part",
        "gradient",
        "bug",
        "Whole blocks of a gradient are missing or a constant times the right ones: heads, "
        "experts, or halves of a joined projection.",
        "The blocks of some heads or experts differ, all others are right.",
        "The computed gradient with these blocks scaled gives every element.",
    ),
    Cause(
        "gradient_tied",
        "gradient",
        "bug",
        "The table of tokens is the head as well, and the gradient has one of its two parts only.",
        "Rows of tokens that are in no sample have no gradient, or those that are have another.",
        "The rows that only one part reaches are right or zero, in every one of them.",
        most="explained",
    ),
    Cause(
        "gradient_repeated",
        "gradient",
        "bug",
        "A row of the table of tokens has the gradient of one occurrence of its token, not of all: "
        "rows are written where they should be added.",
        "Rows of tokens that occur once in the batch are right, those of others are wrong.",
        "No row but those of tokens that occur several times differs.",
        most="explained",
    ),
    Cause(
        "gradient_rows",
        "gradient",
        "bug",
        "Some rows of a gradient are zero: a reduction leaves them out, or a mask does.",
        "Rows are zero that should not be, all others are right.",
        "The computed gradient with these rows zero gives every element.",
    ),
)
Ints = NDArray[np.intp]
SHARDS = 2, 3, 4, 8  # ranks or joined projections that a weight may be cut into
MOST = 0.8  # of the rows of tokens that occur several times: those that are wrong
LEAST = 64  # elements of a block: so many tell a factor of its own from anything else
NEAR = 1e-2  # of a block's squares: what two blocks that are one may be apart
_BLOCKS = ("n_heads", "n_kv_heads", "n_experts")
_BLOCK_NAMES = {"n_heads": "head", "n_kv_heads": "key and value head", "n_experts": "expert"}


def guess_transposed(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that the given gradient is transposed; nothing for vectors."""
    rows, columns = case.computed.shape
    if rows == 1 or columns == 1:
        return

    def made(part: GradientCase) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Return the gradient computed here transposed, under the shape that it had."""
        return np.ascontiguousarray(part.computed.T).reshape(part.computed.shape)

    yield GradientGuess("gradient_transposed", "the gradient is transposed", made)


def guess_block_order(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that equal blocks of rows or columns are in another order.

    The blocks are shards, heads or experts; or the two rows that rope rotates together, which one
    layout has adjacent and the other half a head apart.
    """
    counts = dict.fromkeys((*SHARDS, *(case.sizes.get(name, 0) for name in _BLOCKS)))
    for across in (False, True):
        given, computed = (x.T if across else x for x in (case.given, case.computed))
        rows = len(computed)
        orders = []
        for count in counts:
            if count < 2 or rows % count or rows == 1:
                continue
            found = _block_order(given, computed, count)
            if found is not None:
                what = "columns" if across else "rows"
                shown = join_first(found.tolist(), 8)
                says = f"{count} equal blocks of {what} stand in the order {shown}"
                orders.append((says, np.arange(rows).reshape(count, -1)[found].reshape(-1)))
        for name in _BLOCKS[:2]:
            count = case.sizes.get(name, 0)
            if count and rows % (2 * count) == 0 and not across:
                halves = np.arange(rows).reshape(count, 2, -1)
                says = "rows of each head that rope turns together stand "
                orders.append((says + "side by side", halves.swapaxes(1, 2).reshape(-1)))
                pairs = np.arange(rows).reshape(count, -1, 2)
                orders.append((says + "half a head apart", pairs.swapaxes(1, 2).reshape(-1)))
        for says, order in orders:
            yield GradientGuess("gradient_order", says, _take_in_order(order, across))


def _take_in_order(order: Ints, across: bool) -> Callable[[GradientCase], F64]:
    """Return a function that gives a case's computed gradient with its rows in `order`.

    With `across` its columns are in that order.
    """

    def made(part: GradientCase) -> F64:
        """Return the gradient computed here with its rows, or columns, in `order`."""
        return part.computed[:, order] if across else part.computed[order]

    return made


def _block_order(given: F64, computed: F64, count: int) -> Ints | None:
    """Return for each block of the given gradient the number of the computed block that it is.

    Both are cut into `count` equal blocks of rows. None where each block is its own, where a block
    is near no computed one, or where two are nearest to the same one.
    """
    mine, theirs = (side.reshape(count, -1) for side in (given, computed))
    sizes = (theirs * theirs).sum(axis=1)
    off = (mine * mine).sum(axis=1)[:, None] + sizes - 2 * mine @ theirs.T
    order = off.argmin(axis=1)
    near = off[np.arange(count), order] <= NEAR * np.maximum(sizes[order], 1e-300)
    if not near.all() or len(set(order.tolist())) < count or (order == np.arange(count)).all():
        return None
    found: Ints = order
    return found


def guess_wrong_blocks(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that the gradient of some heads or experts is zero or times a factor."""
    rows, columns = case.computed.shape
    role = split_key(case.key)[1]
    for name in _BLOCKS:
        count = case.sizes.get(name, 0)
        if ("_exps" in role) != (name == "n_experts"):
            continue  # experts have no heads, and heads no experts
        for across in (False, True):
            axis = columns if across else rows
            if count < 2 or axis % count or across != ("attn_output" in role):
                continue
            yield from _guess_blocks(case, name, count, across)


def _guess_blocks(
    case: GradientCase, name: str, count: int, across: bool
) -> Iterator[GradientGuess]:
    """Yield the guess that some of `count` equal blocks of a gradient are missing or scaled.

    `name` is the hyperparameter that counts the blocks (`n_heads`, `n_kv_heads`, `n_experts`);
    `across`: they are blocks of columns, not of rows. Nothing where no block is wrong, or where
    more than half of them are by one factor: the whole gradient is then.
    """
    given, computed = (
        (side.T if across else side).reshape(count, -1) for side in (case.given, case.computed)
    )
    sizes = (computed * computed).sum(axis=1)
    factors = (given * computed).sum(axis=1) / np.where(sizes == 0, 1.0, sizes)
    room = 10 * case.bound
    wrong = (np.abs(factors - 1) > room) & (sizes > 0)
    if not wrong.any():
        return
    if wrong.sum() > 0.5 * (sizes > 0).sum():
        alike = np.ptp(factors[wrong]) <= room * np.abs(factors[wrong]).max()
        if alike or computed.shape[1] < LEAST:
            return
    values = np.where(wrong, factors, 1.0)
    values = np.where(np.abs(values) < 10 * case.bound, 0.0, values)
    what = _BLOCK_NAMES[name]
    shown = ", ".join(
        f"{what} {at}: {'none' if not values[at] else f'{values[at]:.3g} times'}"
        for at in np.flatnonzero(wrong)[:4]
    )

    def made(part: GradientCase) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Return the gradient computed here with each head's or expert's block times its factor.

        `values` has the factors.
        """
        side = part.computed.T if across else part.computed
        blocks = (side.reshape(count, -1) * values[:, None]).reshape(side.shape)
        return np.ascontiguousarray(blocks.T if across else blocks)

    says = f"the gradient of some blocks is another one: {shown}"
    if name == "n_experts" and _are_shares(factors[sizes > 0], case.bound):
        says = (
            f"each expert's gradient is divided by a different number: {shown}; a mean over the "
            "tokens of an expert in place of their sum divides so"
        )
    yield GradientGuess("gradient_part", says, made)


def _are_shares(factors: F64, room: float) -> bool:
    """Return whether every factor is 1/n for a whole n, and two different n above 1 occur.

    `room` is how far n may be off, relative to it. False if a factor is below `room`.
    """
    if (factors < room).any():
        return False
    counts = 1 / factors
    whole = np.abs(counts - np.rint(counts)) <= room * counts
    divisors = {count for count in np.rint(counts).tolist() if count > 1}
    return bool(whole.all()) and len(divisors) > 1


def guess_missing_rows(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that some rows of the given gradient are zero and should not be.

    Nothing where whole heads or experts explain it.
    """
    if len(case.computed) < 2:
        return
    due = np.abs(case.computed).sum(axis=1) > 0
    there = np.abs(case.given).sum(axis=1) > 0
    lost = due & ~there
    if not lost.any() or lost.all() or any(one.right(case) for one in guess_wrong_blocks(case)):
        return  # whole heads are said as heads

    def made(part: GradientCase) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Return the gradient computed here with the rows set to zero that the given one lacks."""
        return np.where(lost[:, None], 0.0, part.computed)

    numbers = np.flatnonzero(lost).tolist()
    says = f"{len(numbers)} rows have no gradient: {join_first(numbers, 4)}"
    yield GradientGuess("gradient_rows", says, made)


def guess_repeated_rows(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that the gradients of a token that occurs several times are not added up.

    Only where just the table rows of such tokens differ, and rows of tokens that occur once are
    right.
    """
    if "embd" not in case.key or not case.repeated:
        return
    known = [at for at in case.repeated if at < len(case.computed)]
    several = np.zeros(len(case.computed), bool)
    several[known] = True
    sizes = np.linalg.norm(case.computed, axis=1)
    off = np.linalg.norm(case.given - case.computed, axis=1)
    wrong = off > case.bound * sizes
    once = (sizes > 0) & ~several
    if not once.any() or wrong[~several].any() or wrong[several].mean() < MOST:
        return
    says = (
        f"{int(wrong.sum())} rows are wrong, all of tokens that occur more than once: their "
        "occurrences are not added up"
    )
    yield GradientGuess("gradient_repeated", says, lambda part: part.given)


def guess_tied_part(case: GradientCase) -> Iterator[GradientGuess]:
    """Yield the guess that a tied table has the gradient of only one of its two uses.

    The uses are the embedding and the head. Rows of tokens that are not in the batch have a
    gradient from the head alone: if it is zero, the head's gradient is missing; if it is right, the
    embedding's is.
    """
    if split_key(case.key)[1] != "token_embd.weight" or not case.sizes.get("tied_embeddings"):
        return
    used = np.zeros(len(case.computed), bool)
    used[[i for i in case.tokens if i < len(used)]] = True
    if used.all() or not used.any():
        return
    if not case.given[~used].any() and case.computed[~used].any():
        says = "the table is tied, and only the embedding's part is in its gradient"
        yield GradientGuess("gradient_tied", says, lambda part: part.given)
    elif case.near(case.given[~used], case.computed[~used]):
        says = "the table is tied, and only the head's part is in its gradient"
        yield GradientGuess("gradient_tied", says, lambda part: part.given)


HYPOTHESES = (
    GradientHypothesis(("gradient_tied",), guess_tied_part, 204, "what a tied table has", True),
    GradientHypothesis(("gradient_repeated",), guess_repeated_rows, 205, "rows of tokens", True),
    GradientHypothesis(
        ("gradient_transposed",), guess_transposed, 206, "exact, nothing is fitted", True
    ),
    GradientHypothesis(
        ("gradient_order",), guess_block_order, 208, "a permutation, no factor", True
    ),
    GradientHypothesis(
        ("gradient_part",), guess_wrong_blocks, 210, "blocks before single rows", True
    ),
    GradientHypothesis(("gradient_rows",), guess_missing_rows, 212, "rows before one factor", True),
)
