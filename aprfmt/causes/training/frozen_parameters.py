"""Parameters that did not move, and what moved in their place."""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.causes.training.optimizers import Recipe, changed
from aprfmt.causes.training.step_case import Mask, StepCase, StepGuess, StepHypothesis
from aprfmt.measure.encoding_noise import float_spacing

CAUSE_ROWS = (
    Cause(
        "frozen",
        "update",
        "bug",
        "A parameter did not move, and its step is large enough to be seen: it is frozen, or in no "
        "group of the optimizer.",
        "Not one element differs, where the gradient or the moments give a step.",
        "The weight is the one of before the step, in every element.",
    ),
    Cause(
        "step_skipped",
        "update",
        "bug",
        "A parameter decayed and made no step, though it has a gradient: the optimizer skipped it, "
        "as after an overflow of the loss scale, and the decay is made apart.",
        "Every element has shrunk by the decay, where the gradient or the moments give a step.",
        "The decay alone gives every weight.",
    ),
    Cause(
        "rows_frozen",
        "update",
        "bug",
        "Some rows of a parameter did not move, and their step is large enough to be seen. A shard "
        "may begin or end inside a row.",
        "The rows are as they were, all others are right.",
        "Without these rows the step gives every weight.",
    ),
    Cause(
        "rows_moved",
        "update",
        "bug",
        "Rows without a gradient moved, by weight decay or old moments, where a sparse optimizer "
        "leaves them as they are: a dense one made the step.",
        "Rows of tokens that are not in the batch moved.",
        "The same rule over all rows gives every weight.",
    ),
    Cause(
        "moved_without_gradient",
        "update",
        "bug",
        "A parameter of which no gradient was saved moved by its weight decay or by its old "
        "moments: it is frozen, but the optimizer has it with a gradient of zero.",
        "Gradients of other parameters were given, and none of this one.",
        "A gradient of zero gives every weight after the step.",
    ),
    Cause(
        "adapter_half_frozen",
        "update",
        "bug",
        "One factor of a LoRA pair moved and the other did not, though it has a gradient.",
        "B did not move although A did, or A did not although B that is not zero.",
        "The factor is the one of before the step, in every element.",
        most="explained",
    ),
    Cause(
        "adapter_frozen",
        "update",
        "bug",
        "Both factors of a LoRA pair are as they were, where other pairs moved: no gradient "
        "reached them.",
        "Pairs of a role or of a layer did not move.",
        "Nothing confirms it without the gradient.",
        most="located",
    ),
)


SPARSE = "rows without a gradient did not move: a sparse or lazy optimizer (sparse=1 states it)"


SHARDS = 2, 4, 8, 16  # that rows are cut into over ranks


def _still_shard(rows: NDArray[np.int64], moves: Mask, lost: Mask) -> tuple[int, int] | None:
    """Return (number from 1, number of shards) of the one shard of rows that did not move, or None.

    `rows` are the row numbers looked at, the parameter's last one among them. The mask `moves`
    says which moved, `lost` which stood still although they should have moved. None where the
    rows in `lost` are not those of one of the equal shards.
    """
    for count in SHARDS:
        size, left = divmod(int(rows[-1]) + 1, count)
        if left or not size:
            continue
        shards = rows // size
        first, last = shards[lost][[0, -1]]
        inside = shards == first
        if first == last and lost[inside].mean() >= MOSTLY and not moves[inside].any():
            return int(first) + 1, count
    return None


MOSTLY = 0.5  # of a shard's rows have to move: others may have no gradient


def _must_move(case: StepCase, recipe: Recipe) -> Mask | None:
    """Return the mask [n] of elements whose expected step exceeds a spacing of the stored type.

    None if there is none, only the signs of the gradient are known, or the step is not known.
    """
    update = None if case.signs or case.change.size == 0 else case.predict(recipe)
    if update is None:
        return None
    found: Mask = np.abs(update.whole) > float_spacing(case.before, case.encodings[1])
    return found if found.any() else None


def guess_frozen(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that a parameter is `frozen`: not one of its elements moved.

    Nothing where the stored type is too coarse to show the expected step of any element, or where
    only the signs of the gradient are known.
    """
    if not case.change.any() and _must_move(case, recipe) is not None:
        says = "did not move, though its step is larger than what its type rounds away"
        yield StepGuess("frozen", says, holds=lambda part: not part.change.any())


def guess_skipped_step(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that a parameter moved by its weight decay alone.

    Nothing where the rule does not decay it apart from the gradient, only the signs of the gradient
    are known, or the stored type is too coarse to show the step of any element.
    """
    if recipe.adds_decay_to_gradient or not recipe.decays(case.vector) or not case.change.any():
        return
    if _must_move(case, recipe) is not None:
        says = "it moved by its weight decay alone, and made no step"
        yield StepGuess("step_skipped", says, changed(recipe, factor=0.0))


def guess_frozen_rows(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that some rows of a parameter that moved are frozen (`rows_frozen`).

    Nothing where the stored type is too coarse to show the expected step, or where only the signs
    of the gradient are known.
    """
    large = _must_move(case, recipe)
    if large is None or not case.change.any():
        return
    fit = case.fit(recipe)
    assert fit is not None
    rows, order = np.unique(case.rows, return_inverse=True)
    moves = np.bincount(order, case.change != 0) > 0
    due = np.bincount(order, large) > 0
    lost = ~moves & due
    if not lost.any() or not fit.near[~lost[order]].all():
        return
    numbers = rows[lost]
    shown = join_first(numbers.tolist(), 4)
    says = f"rows did not move: {shown}" if numbers.size < 9 else "many rows did not move"
    if shard := _still_shard(rows, moves, lost):
        says = f"part {shard[0]} of {shard[1]} of the rows did not move, as of a shard"
    if case.gradient is not None and not case.gradient[lost[order]].any():
        says = SPARSE

    yield StepGuess("rows_frozen", says, holds=partial(_is_right_outside_rows, recipe, numbers))


def _is_right_outside_rows(recipe: Recipe, numbers: NDArray[np.int64], part: StepCase) -> bool:
    """Return whether all rows moved as the recipe says, except `numbers`, which may stand still.

    `part` has some elements of one parameter before and after the step.
    """
    inner = part.fit(recipe)
    stay = np.isin(part.rows, numbers)
    return (
        inner is not None
        and bool((inner.near | (part.change == 0))[stay].all())
        and bool(inner.near[~stay].all())
    )


def guess_cut_shard(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that one range of elements did not move, which begins or ends inside a row.

    An optimizer that cuts all parameters together into equal shards leaves such a range
    (`rows_frozen`). Nothing unless all elements of the parameter are in the case, and all outside
    the range are as expected.
    """
    due = _must_move(case, recipe)
    fit = case.fit(recipe)
    if due is None or fit is None or case.shape is None or not case.change.any():
        return
    wrong = np.flatnonzero(~fit.near)
    if not wrong.size:
        return
    first, stop, columns = int(wrong[0]), int(wrong[-1]) + 1, case.shape[1]
    if case.change[first:stop].any() or due[first:stop].mean() < MOSTLY:
        return
    places = [
        f"{word} column {at % columns} of row {at // columns}"
        for word, at in (("from", first), ("to before", stop))
        if at % columns
    ]
    if places:
        says = f"elements did not move {' '.join(places)}, as of a shard that is cut inside a row"
        numbers = np.unique(case.rows[first:stop])
        yield StepGuess("rows_frozen", says, holds=partial(_is_right_outside_rows, recipe, numbers))


def guess_sparse(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that the optimizer is SparseAdam, which skips rows without a gradient.

    Nothing where all rows have a gradient, or one without a gradient moved.
    """
    if case.gradient is None or case.vector or recipe.sparse or not recipe.row.second:
        return
    order = np.unique(case.rows, return_inverse=True)[1]
    idle = (np.bincount(order, case.gradient != 0) == 0)[order]
    update = case.predict(recipe)
    if update is None or not idle.any() or case.change[idle].all():
        return
    width = float_spacing(case.before, case.encodings[1])
    if (np.abs(update.whole) > width)[idle].any():
        yield StepGuess("rows_frozen", SPARSE, changed(recipe, sparse=True))


def guess_dense(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guess that rows without a gradient moved too, where the rule is sparse."""
    if recipe.sparse:
        says = "rows without a gradient moved: the optimizer is dense, and sparse is stated"
        yield StepGuess("rows_moved", says, changed(recipe, sparse=False))


HYPOTHESES = (
    StepHypothesis(("rows_moved",), guess_dense, 0, "the same rule over other rows"),
    StepHypothesis(("rows_frozen",), guess_sparse, 3, "another rule for rows without a gradient"),
    StepHypothesis(("frozen",), guess_frozen, 1, "nothing moved: before any rule", whole=True),
    StepHypothesis(("step_skipped",), guess_skipped_step, 9, "the decay alone"),
    StepHypothesis(("rows_frozen",), guess_frozen_rows, 2, "the same rule without some rows"),
    StepHypothesis(
        ("rows_frozen",), guess_cut_shard, 5, "one run of elements, after whole rows", whole=True
    ),
)
