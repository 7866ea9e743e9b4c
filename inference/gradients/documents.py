"""The sequences of a trainer's batch, and what each label weighs in the batch's loss.

Every document of the batch is a separate sequence, without its padding, as `batch.score` runs
them. The loss is the mean over the scored labels of the whole batch (reduction `tokens`,
transformers' and torch's), or the mean over rows of each row's mean (`rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import UsageError
from aprfmt.inference.batch import Batch
from aprfmt.inference.gradients.changes import RIGHT, BackwardChange, RouterFactors

Reduction = Literal["tokens", "rows"]


def join_documents(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the rows of all documents as one array.

    `parts` are the documents' arrays. If their shapes differ after the first axis, as attention's
    do, they are flattened.
    """
    if len(parts) == 1:
        return parts[0]
    if len({each.shape[1:] for each in parts}) == 1:
        return np.concatenate(parts)
    return np.concatenate([each.reshape(-1) for each in parts])


@dataclass(frozen=True)
class Document:
    """One sequence of a batch: `ids` [tokens], and where row t is scored its label, else -100.

    `weight` is what the sum of its labels' losses is multiplied by in the batch's loss. `row` and
    `start` are where it begins in the batch. `positions` [tokens] are None where they count from 0.
    `padding` is the number of tokens at its end that are padding. `factors` [tokens] multiply the
    losses of its labels, None where all count once.
    """

    row: int
    start: int
    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    weight: float
    positions: NDArray[np.int64] | None = None
    padding: int = 0
    factors: NDArray[np.float64] | None = None


def documents(
    batch: Batch, reduction: Reduction = "tokens", change: BackwardChange = RIGHT
) -> list[Document]:
    """Return the sequences of a batch that have a scored label, each without padding.

    Where routers have an auxiliary loss all sequences are returned, as that loss is of all tokens.

    Documents packed into one row are separate sequences. `reduction` says what the loss is the mean
    over: all labels (`tokens`) or rows (`rows`). `change` is a mistake in the sequences: other
    weights of rows or labels, documents that are joined, padding that a backward without a mask
    attends to, padding at the beginning of a row that is attended to or counted, or at the end that
    is scored. Raises UsageError where no label is scored.
    """
    label, ahead = batch.label, change.shift
    if change.unmasked:
        label = label | unlabelled(batch)
    if change.inverted:
        label = unlabelled(batch)
    if change.edges:
        label = label | batch.document_starts
    width = batch.row_length
    if change.scores_padding:
        label = label.copy()
        label[:, :width] |= np.logical_or.accumulate(batch.mask, 1) & ~batch.mask
    scored, targets = np.zeros((len(label), width), bool), np.full((len(label), width), -100)
    begin = max(0, -ahead)
    ids = batch.ids
    if any(change.rolled):
        label = np.roll(label[:, :width], change.rolled, (0, 1))
        ids = np.roll(ids[:, :width], change.rolled, (0, 1))
    stop = min(width, label.shape[1] - ahead)  # rows [begin, stop) have their label in the batch
    scored[:, begin:stop] = label[:, begin + ahead : stop + ahead]
    targets[:, begin:stop] = ids[:, begin + ahead : stop + ahead]
    if not (change.runs_padding or change.padding == "attended"):
        scored &= batch.mask  # padding is not run, and predicts nothing
    per_row, total = scored.sum(1), int(scored.sum())
    if not total:
        raise UsageError(f"{batch.path}: no label is scored, so there is no loss; expected labels")
    routed = routers(batch, change).any
    rows_scored = int(np.count_nonzero(per_row))
    each = np.zeros(scored.shape)
    each[scored] = 1.0 if change.labels is None else change.labels
    found = []
    for row, mask in enumerate(batch.mask):
        inside = np.flatnonzero(mask)
        if not len(inside):
            continue
        first, stop = int(inside[0]), int(inside[-1]) + 1
        starts = [int(at) for at in np.flatnonzero(batch.document_starts[row])]
        restart = None
        if change.padding == "attended" and not starts:
            first = 0
        elif change.padding == "counted" and not starts:
            restart = np.arange(first, stop)
        if change.joined and starts:
            if change.joined == "positions restart":
                ends = pairwise([first, *starts, stop])
                restart = np.concatenate([np.arange(end - start) for start, end in ends])
            starts = []
        padding = 0
        if change.runs_padding and not starts:
            padding = batch.row_length - stop
            stop = batch.row_length
        factor = 1.0 if change.rows is None else change.rows[row]
        cuts = [first, *starts, stop]
        for start, end in pairwise(cuts):
            labels = np.where(scored[row, start:end], targets[row, start:end], -100)
            if ((labels >= 0).any() and factor) or routed:
                many = total if reduction == "tokens" else max(1, int(per_row[row])) * rows_scored
                tokens = batch.ids[row, start:end]
                factors = None if change.labels is None else each[row, start:end]
                found.append(
                    Document(row, start, tokens, labels, factor / many, restart, padding, factors)
                )
    return found


def unlabelled(batch: Batch) -> NDArray[np.bool_]:
    """Return the mask [rows, tokens + 1] of the text's tokens that may be labels and are none."""
    found = np.zeros_like(batch.label)
    found[:, : batch.row_length] = batch.mask
    return found & ~batch.document_starts & ~batch.label


def routers(batch: Batch, change: BackwardChange = RIGHT) -> RouterFactors:
    """Return the factors of routers' auxiliary losses: the mistake's, else the batch's."""
    if change.router is not None:
        return change.router
    return RouterFactors(batch.router_balance or 0.0, 0.0, batch.router_z or 0.0)
