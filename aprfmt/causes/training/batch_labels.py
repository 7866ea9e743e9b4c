"""Gradients in which some labels of a batch do not count, or have a weight by their position.

The *parts* of a gradient are here what each label of the batch alone adds to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.causes.training.backward_case import (
    BackwardCase,
    BackwardGuess,
    BackwardHypothesis,
    LabelParts,
    all_differ,
)
from aprfmt.causes.training.batch_samples import (
    NEAR,
    distance_to_given,
    fit_factors,
    has_both_signs,
    objective_text,
)
from aprfmt.causes.training.optimizers import F64
from aprfmt.causes.training.step_case import Mask
from aprfmt.inference.gradients.changes import BackwardChange
from aprfmt.inference.micro_batches import micro_batches

_MADE = "The batch's gradients, computed that way, give every parameter's."
CAUSE_ROWS = (
    Cause(
        "labels_left_out",
        "gradient",
        "bug",
        "Labels of the batch are not in the gradient: its rows were cut at a length, or a token, "
        "the first or the last label of each row is not scored.",
        "All gradients differ, and that of the last norm is the sum over a part of the labels.",
        _MADE,
    ),
    Cause(
        "position_means",
        "gradient",
        "bug",
        "The gradient is the mean of the means over parts of the positions: ranks that share a "
        "row, or chunks of its loss, count alike whatever number of labels they have.",
        "All gradients differ, and each label counts by the part of the row that it stands in.",
        _MADE,
    ),
    Cause(
        "labels_weighted",
        "gradient",
        "bug",
        "Labels of the batch have weights in the gradient: a prompt or a token counts less or "
        "more, or each label by its place. If the loss is meant so, state the weights.",
        "All gradients differ, and that of the last norm is the sum over the labels with factors "
        "of their own.",
        _MADE,
    ),
)
NORM = "output_norm.weight"  # whose gradient is known by label
SHARES = 2, 4, 8, 16  # ranks or chunks that a row is cut into
SHOWN = 6  # factors that a sentence lists
TRIED = 3  # of the guesses that give the last norm's gradient: how many are made in all others


@dataclass(frozen=True)
class _LabelFactors:
    """One way in which labels may count: a cause, a sentence, and the factor of each label."""

    cause: str
    says: str
    factors: F64


def guess_labels(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that labels are left out, or have weights by their position.

    Each guess is tested on the gradient of the last norm, where each label's own part is known.
    """
    if NORM not in case.wrong | case.open or not all_differ(case):
        return
    parts = case.by_label()  # takes a pass backward
    if parts is None:
        return
    found: list[tuple[float, _LabelFactors]] = []
    seen: set[bytes] = set()
    for way in (
        *_rows_cut_short(parts),
        *_first_or_last(parts),
        *_guess_unscored_token(parts),
        *_means_of_parts(case, parts),
        *_means_of_rows(case, parts),
    ):
        known = np.round(way.factors, 9).tobytes()
        if known in seen or np.all(way.factors == way.factors[0]):
            continue
        seen.add(known)
        distance = distance_to_given(case, NORM, parts.mean(way.factors))
        if distance <= NEAR:
            found.append((distance, way))
    yield from _guesses(found)


def guess_label_weights(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that labels have weights, solved from the gradient of last norm or head."""
    if NORM not in case.wrong | case.open or not all_differ(case):
        return
    parts = case.by_label()
    if parts is not None:
        yield from _guesses([*_solve_weights(case, parts)])


def _guesses(found: Sequence[tuple[float, _LabelFactors]]) -> Iterator[BackwardGuess]:
    """Yield guesses of the ways that give the last norm's gradient best, nearest first.

    `found` has (relative L2 distance, way) each.
    """
    for _, way in sorted(found, key=lambda each: each[0])[:TRIED]:
        change = BackwardChange(labels=tuple(float(x) for x in way.factors))
        if has_both_signs(way.factors):
            says = objective_text("labels", way.says)
            yield BackwardGuess(way.cause, says, change, objective=True)
        else:
            yield BackwardGuess(way.cause, way.says, change)


def _kept_only(parts: LabelParts, kept: Mask, says: str) -> Iterator[_LabelFactors]:
    """Yield the ways in which only the labels in the mask `kept` count.

    Their sum is divided by their number, or by the number of all labels.
    """
    many, of = int(kept.sum()), len(kept)
    if not 0 < many < of:
        return
    text = f"{says}: {of - many} of {of} labels are not in the gradient"
    yield _LabelFactors("labels_left_out", text, np.where(kept, of / many, 0.0))
    yield _LabelFactors(
        "labels_left_out", f"{text}, and the sum is divided by all", kept.astype(np.float64)
    )


def _rows_cut_short(parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield, for each number of tokens, the way in which rows were cut off after so many tokens.

    Labels after that do not count.
    """
    columns = np.unique(parts.columns)
    for before, after in pairwise(columns):
        # Between two columns with labels nothing says where the row was cut.
        length = f"{after}" if after == before + 1 else f"{before + 1} to {after}"
        yield from _kept_only(parts, parts.columns <= before, f"rows are cut after {length} tokens")


def _first_or_last(parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the ways in which each row's first or last label is not scored, or alone is scored."""
    first = np.append(True, np.diff(parts.rows) != 0)
    last = np.append(np.diff(parts.rows) != 0, True)
    yield from _kept_only(parts, ~first, "the first label of each row is not scored")
    yield from _kept_only(parts, ~last, "the last label of each row is not scored")
    yield from _kept_only(parts, last, "only the last label of each row is scored")
    yield from _kept_only(parts, first, "only the first label of each row is scored")


def _guess_unscored_token(parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the ways in which one token is never scored, as if it were padding."""
    for token in np.unique(parts.tokens):
        yield from _kept_only(parts, parts.tokens != token, f"token {token} is never scored")


def _means_of_parts(case: BackwardCase, parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the ways in which the loss is a mean of means, over equal ranges of the positions."""
    of = len(parts.columns)
    for shares in SHARES:
        if shares > case.row_length:
            return
        # A row of a rank is one that predicts: the column before its label's.
        size = -(-case.row_length // shares)
        for ahead, where in ((1, "rows that predict"), (0, "labels")):
            part = (parts.columns - ahead) // size
            counts = np.bincount(part, minlength=shares).astype(np.float64)
            there = int((counts > 0).sum())
            factors = of / counts[part] / there
            says = f"the mean of the means of {shares} parts of the positions, by their {where}"
            yield _LabelFactors("position_means", says, factors)
            if there < shares:
                says += f", {shares - there} of which have none"
                yield _LabelFactors("position_means", says, factors * there / shares)


def _means_of_rows(case: BackwardCase, parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the ways in which rows are averaged by micro-batch or rank before they are joined.

    The means are averaged or added up, or only the first or last one is there.
    """
    of, many = len(parts.rows), len(case.labels)
    alone: list[Sequence[int]] = [[row] for row in range(many)]
    for says, groups in (("samples, each by itself", alone), *micro_batches(many)):
        group = np.zeros(many, np.int64)
        for number, rows in enumerate(groups):
            group[list(rows)] = number
        part = group[parts.rows]
        counts = np.bincount(part, minlength=len(groups)).astype(np.float64)
        there = int((counts > 0).sum())
        if there < 2:
            continue
        means = of / counts[part] / there
        yield _LabelFactors("micro_batch_means", f"the mean of the means of {says}", means)
        yield _LabelFactors("micro_batch_means", f"the sum of the means of {says}", means * there)
        for place, number in (("first", 0), ("last", len(groups) - 1)):
            for one in _kept_only(parts, part == number, f"only the {place} of {says} is there"):
                yield replace(one, cause="samples_left_out")


def _solve_weights(case: BackwardCase, parts: LabelParts) -> Iterator[tuple[float, _LabelFactors]]:
    """Yield (relative L2 distance, way) of label weights that give the last norm's gradient.

    Two weights are solved: one for the labels up to a column and one for the others, one for the
    labels of one token and one for the others, or a constant and a slope by column. Where none
    fits, each label's own weight is solved from the gradient of the head.
    """
    every = len(parts.columns)
    splits = [
        *((parts.columns <= at, f"labels up to column {at}") for at in np.unique(parts.columns)),
        *((parts.tokens == token, f"labels of token {token}") for token in np.unique(parts.tokens)),
    ]
    found = []
    for part, says in splits:
        if not 0 < int(part.sum()) < every:
            continue
        solved = _solve_label_factors(
            case, parts, [part.astype(np.float64), (~part).astype(np.float64)]
        )
        if solved is not None and abs(solved[1][0] - solved[1][1]) > NEAR * abs(solved[1][1]):
            found.append((solved[0], _two_weights(part, solved[1], says)))
    column = parts.columns.astype(np.float64)
    solved = _solve_label_factors(case, parts, [np.ones(every), column])
    if solved is not None and abs(solved[1][1]) * float(np.ptp(column)) > NEAR:
        first, more = solved[1]
        says = f"a label in column n counts {first:.3g} + {more:.3g} n times"
        found.append((solved[0], _LabelFactors("labels_weighted", says, first + more * column)))
    head = parts.head
    if not found and head is not None and head.key in case.wrong | case.open:
        off, factors = head.solve(case.case(head.key).given)
        if off <= NEAR:
            found.append((off, _label_weights(parts, factors)))
    yield from found


def _solve_label_factors(
    case: BackwardCase, parts: LabelParts, basis: Sequence[F64]
) -> tuple[float, F64] | None:
    """Return (relative L2 distance, solved numbers) of label factors that are a sum of `basis`.

    `basis` has arrays [labels]. None where no such sum gives the last norm's gradient.
    """
    given = case.case(NORM).given.reshape(-1).astype(np.float64)
    made = np.stack([parts.mean(each) for each in basis], axis=1)
    solved, off = fit_factors(made, given)
    return (off, solved) if off <= NEAR else None


def _two_weights(part: Mask, solved: F64, says: str) -> _LabelFactors:
    """Return the way in which labels in the mask `part` have one weight and the others another.

    `solved` has the two factors, `says` describes the labels of `part`.
    """
    first, other = (float(x) for x in solved)
    factors = np.where(part, first, other)
    if abs(other) <= NEAR * abs(first):
        return _LabelFactors("labels_weighted", f"{says} alone count, {first:.3g} times", factors)
    ratio = first / other
    short = float(f"{ratio:.2g}")  # somebody wrote it
    ratio = short if abs(ratio - short) <= NEAR * abs(short) else ratio
    weights = np.where(part, ratio, 1.0)
    says = f"{says} count {ratio:.3g} times as much as the others"
    for divided, by in ((weights.mean(), "the sum of the weights"), (1.0, "the number of labels")):
        if abs(other * divided - 1) <= NEAR:
            text = f"{says}, divided by {by}"
            return _LabelFactors("labels_weighted", text, weights / divided)
    return _LabelFactors("labels_weighted", f"{says}, which count {other:.3g} times", factors)


def _label_weights(parts: LabelParts, solved: F64) -> _LabelFactors:
    """Return the way in which each label has its own solved factor."""
    low = solved <= (solved.min() + solved.max()) / 2
    two = np.where(low, solved[low].mean(), solved[~low].mean() if not low.all() else 0.0)
    if np.allclose(solved, two, atol=NEAR * float(np.abs(solved).max())):
        same = np.diff(parts.rows) == 0
        prefix = not (low[1:] & ~low[:-1] & same).any()
        suffix = not (low[:-1] & ~low[1:] & same).any()
        where = " of their rows, the first" if prefix else " of their rows, the last" * suffix
        one = np.array([two[low][0], two[~low][0]])
        return _two_weights(low, one, f"{int(low.sum())} of {len(low)} labels{where},")
    shown = join_first([f"{value:.3g}" for value in solved], SHOWN)
    return _LabelFactors("labels_weighted", f"labels count {shown} times", solved)


HYPOTHESES = (
    BackwardHypothesis(
        ("labels_left_out", "position_means", "micro_batch_means", "samples_left_out"),
        guess_labels,
        323,
        "where labels stand is fitted",
    ),
    BackwardHypothesis(
        ("labels_weighted",), guess_label_weights, 326, "two numbers, or one a label, are fitted"
    ),
)
