"""Losses of a batch whose rows and labels stand in another layout than [samples, tokens].

Chunks are ranges of the rows of logits, flattened or not, whose means are taken one by one. Rows
that are scored against the labels of another place come of samples and positions exchanged.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.batch import Batch, ScoredSample
from aprfmt.inference.loss import log_probabilities, rows_at_once
from aprfmt.inference.session import Numbers, Session

LEAST_CHUNK = 4  # rows: shorter chunks are as many numbers as fit anything
PARTS = (2, 3, 4, 6, 8, 16, 32, 64)  # that a batch's rows are divided into

Chunks = list[Numbers]  # the losses of the labels of each chunk, in nats


def divide_into_chunks(
    batch: Batch, scored: Sequence[ScoredSample]
) -> Iterator[tuple[str, int, Chunks]]:
    """Yield (description, chunks with those that are empty, losses of each chunk that is not).

    The chunks are of the rows of logits: of all samples one after the other, with the last column
    or without it; of columns of all samples; and of each sample. Their lengths are powers of two,
    divisors of the number of rows, and what a usual number of chunks gives. Equal ones come once.
    """
    width = batch.row_length
    nats = np.full((len(scored), width), np.nan)
    for sample, one in enumerate(scored):
        own = batch.label[sample, 1:] & batch.mask[sample]
        nats[sample, own] = one.nats[1, own]
    if not np.isfinite(nats).any():
        return
    seen: set[bytes] = set()
    layouts = [
        ("of the flattened batch", nats.reshape(1, -1)),
        ("of the flattened batch without its last column", nats[:, :-1].reshape(1, -1)),
        ("of the columns of all samples", nats[None]),
        ("of each sample", nats[:, None]),
    ]
    for where, rows in layouts:
        many = rows.shape[-1]
        sizes = {2**k for k in range(2, 20)} | {-(-many // parts) for parts in PARTS}
        sizes |= {size for size in range(LEAST_CHUNK, many) if many % size == 0}
        for size in sorted(size for size in sizes if LEAST_CHUNK <= size < many):
            parts = [rows[..., at : at + size] for at in range(0, many, size)]
            each = [x[~np.isnan(x)] for part in parts for x in part]
            held = [x for x in each if x.size]
            known = b"|".join(x.tobytes() for x in held)
            if len(held) > 1 and known not in seen:
                seen.add(known)
                yield f"chunks of {size} rows {where}", len(each), held


def score_elsewhere(batch: Batch, session: Session | None) -> Iterator[tuple[str, float]]:
    """Yield (description, mean loss in nats) where rows are scored against labels of another place.

    The logits are the session's, or those of the file. Nothing of one sample, of packed rows, and
    where a row begins with padding.
    """
    known = session is not None or batch.logits is not None
    if len(batch.mask) < 2 or batch.document is not None or not batch.mask[:, 0].all() or not known:
        return
    labels = np.where(batch.label, batch.ids, -100)[:, 1:]
    ways = {
        words: targets
        for words, targets in _other_places(labels).items()
        if not np.array_equal(targets, labels)
    }
    sums, counts = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for sample, ids in enumerate(batch.ids):
        at = 0
        for part in _logits_of(batch, session, sample, ids):
            logs = log_probabilities(np.asarray(part))
            for words, targets in ways.items():
                wanted = targets[sample, at : at + len(logs)]
                rows = np.flatnonzero(wanted >= 0)
                sums[words] -= float(logs[rows, wanted[rows]].sum())
                counts[words] += len(rows)
            at += len(logs)
    for words, total in sums.items():
        if counts[words]:
            yield words, total / counts[words]


def _logits_of(
    batch: Batch, session: Session | None, sample: int, ids: NDArray[np.int64]
) -> Iterator[Numbers]:
    """Yield the logits [rows, vocab] of a sample's rows, padding among them, in parts."""
    if session is None:
        assert batch.logits is not None
        yield batch.logits[sample]
        return
    most = rows_at_once(int(session.hp["vocab_size"]))
    tokens = [int(i) for i in ids[: batch.row_length]]
    yield from session.logits_in_parts(tokens, range(len(tokens)), most)


def _other_places(labels: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return {description: the label that each row is scored against}, all [samples, tokens].

    `labels` are the right ones, below 0 where nothing is scored.
    """
    samples = len(labels)
    found = {
        "of the sample before": np.roll(labels, 1, 0),
        "of the sample after": np.roll(labels, -1, 0),
    }
    for width, of in ((labels.shape[1], ""), (labels.shape[1] - 1, " without the last row")):
        kept = labels[:, :width]
        by_position = np.full_like(labels, -100)
        by_position[:, :width] = kept.reshape(width, samples).T
        by_sample = np.full_like(labels, -100)
        by_sample[:, :width] = kept.T.reshape(samples, width)
        found[f"of [samples, tokens], and the rows are of [tokens, samples]{of}"] = by_position
        found[f"of [tokens, samples], and the rows are of [samples, tokens]{of}"] = by_sample
    return found
