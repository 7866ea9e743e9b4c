"""Gradients in which single labels of a batch do not count, or count by where they stand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.backward_case import (
    BackwardCase,
    BackwardGuess,
    BackwardHypothesis,
    LabelParts,
)
from aprfmt.causes.training.batch_samples import NEAR, all_differ, distance_to_given
from aprfmt.causes.training.optimizers import F64
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
)
NORM = "output_norm.weight"  # whose gradient is known by label
SHARES = 2, 4, 8, 16  # ranks or chunks that a row is cut into
TRIED = 3  # of the guesses that give the last norm's gradient: how many are made in all others


@dataclass(frozen=True)
class _LabelFactors:
    """One way in which labels may count: a cause, a sentence, and the factor of each label."""

    cause: str
    says: str
    factors: F64


def guess_labels(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that labels are left out, or count by where they stand.

    They are held to the gradient of the last norm, to which what each label adds is known.
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
        *_unscored(parts),
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
    for _, way in sorted(found, key=lambda each: each[0])[:TRIED]:
        change = BackwardChange(labels=tuple(float(x) for x in way.factors))
        yield BackwardGuess(way.cause, way.says, change)


def _kept_only(
    parts: LabelParts, kept: "np.ndarray[tuple[int], np.dtype[np.bool_]]", says: str
) -> Iterator[_LabelFactors]:
    """Yield the ways in which only the `kept` labels count: divided by their number, or by all."""
    many, of = int(kept.sum()), len(kept)
    if not 0 < many < of:
        return
    text = f"{says}: {of - many} of {of} labels are not in the gradient"
    yield _LabelFactors("labels_left_out", text, np.where(kept, of / many, 0.0))
    yield _LabelFactors(
        "labels_left_out", f"{text}, and the sum is divided by all", kept.astype(np.float64)
    )


def _rows_cut_short(parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the factors of the labels where rows were cut after a number of tokens, for each one.

    Labels behind the cut do not count.
    """
    columns = np.unique(parts.columns)
    for before, after in pairwise(columns):
        # Between two columns with labels nothing says where the row was cut.
        length = f"{after}" if after == before + 1 else f"{before + 1} to {after}"
        yield from _kept_only(parts, parts.columns <= before, f"rows are cut after {length} tokens")


def _first_or_last(parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the ways in which the first or last label of each row is lost, or the only one."""
    first = np.append(True, np.diff(parts.rows) != 0)
    last = np.append(np.diff(parts.rows) != 0, True)
    yield from _kept_only(parts, ~first, "the first label of each row is not scored")
    yield from _kept_only(parts, ~last, "the last label of each row is not scored")
    yield from _kept_only(parts, last, "only the last label of each row is scored")
    yield from _kept_only(parts, first, "only the first label of each row is scored")


def _unscored(parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the ways in which one token is never scored, as if it were padding."""
    for token in np.unique(parts.tokens):
        yield from _kept_only(parts, parts.tokens != token, f"token {token} is never scored")


def _means_of_parts(case: BackwardCase, parts: LabelParts) -> Iterator[_LabelFactors]:
    """Yield the ways in which the loss is a mean of means over ranks or chunks of positions."""
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
    """Yield the ways in which the loss is one of micro-batches or ranks, or joins their means."""
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


HYPOTHESES = (
    BackwardHypothesis(
        ("labels_left_out", "position_means", "micro_batch_means", "samples_left_out"),
        guess_labels,
        323,
        "where labels stand is fitted",
    ),
)
