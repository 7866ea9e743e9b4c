"""A batch of a trainer: token ids, labels and mask of an .npz, and the loss of every row.

Rows and tokens are counted from 0; row t of the logits predicts token t + 1. A label below 0
(-100 in transformers and torch) is not scored.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import FormatError, UsageError
from aprfmt.inference.engines.npz import NpzFile
from aprfmt.inference.loss import log_probabilities, rows_at_once
from aprfmt.inference.session import Numbers, Session

NAMES: Mapping[str, tuple[str, ...]] = {
    "ids": ("ids", "input_ids", "tokens"),
    "labels": ("labels", "targets"),
    "mask": ("mask", "attention_mask"),
    "logits": ("logits",),
}
# What `labels[t]` may be: the token at t + shift. 0 is transformers' convention (the loss shifts),
# 1 that of loaders that shift themselves; the others are mistakes of the file.
SHIFTS: Mapping[int, str] = {
    0: "the tokens themselves; the loss shifts them",
    1: "the next tokens: shifted in the file",
    2: "the tokens after the next: shifted twice in the file",
    -1: "the tokens before",
}
PROPER = (0, 1)
AHEAD = 3  # tokens a row is scored against: its own, the next, the one after


@dataclass(frozen=True)
class Batch:
    """Arrays [samples, tokens]; `label` [samples, tokens + 1] says which tokens are scored.

    `ids` has one column more, the token after the last where the labels hold it, else -1.
    `logits` [samples, tokens, vocab] are the trainer's own, if the file has them.
    """

    path: Path
    ids: NDArray[np.int64]
    label: NDArray[np.bool_]
    mask: NDArray[np.bool_]
    shift: int
    logits: Numbers | None = None

    @property
    def tokens(self) -> int:
        """The length of a row, padding included."""
        return int(self.mask.shape[1])

    @property
    def scored(self) -> int:
        """The number of labels."""
        return int(self.label.sum())


@dataclass(frozen=True)
class Scored:
    """The losses in nats of one sample's rows, float64 [AHEAD, tokens]; NaN where none was run.

    Entry k of row t is the loss of token t + k. `whole` are those of a pass over the padding as
    well, which attends to what stands before; the same array where there is no padding.
    """

    nats: Numbers
    whole: Numbers


def read_batch(path: Path, vocab: int) -> Batch:
    """Read ids, labels, mask and logits of an .npz; labels default to all tokens of the mask.

    Raises FormatError for arrays that do not form a batch, or labels that are not its tokens.
    """
    with ExitStack() as stack:
        file = NpzFile(path, stack)
        found = {name: _read(file, name, known) for name, known in NAMES.items()}
    ids = found["ids"]
    if ids is None:
        raise FormatError(
            f"{path}: holds {', '.join(sorted(file.arrays)[:8]) or 'nothing'}; expected an array "
            f"{' or '.join(NAMES['ids'])}"
        )
    ids = _integers(path, "ids", ids)
    _inside(path, ids, vocab)
    mask = np.ones(ids.shape, bool)
    if found["mask"] is not None:
        mask = _integers(path, "mask", found["mask"], ids.shape) != 0
    for sample in np.flatnonzero(np.abs(np.diff(mask.astype(np.int8), axis=1)).sum(1) > 1):
        inside = np.flatnonzero(mask[sample])
        if len(inside) != inside[-1] - inside[0] + 1:
            raise FormatError(
                f"{path}: mask of sample {sample} has a hole between tokens {inside[0]} and "
                f"{inside[-1]}; expected padding at the ends only"
            )
    given = found["labels"]
    labels = (
        np.where(mask, ids, -100) if given is None else _integers(path, "labels", given, ids.shape)
    )
    logits = found["logits"]
    if logits is not None:
        logits = logits[None] if logits.ndim == 2 else logits
        if logits.shape != (*ids.shape, vocab) or logits.dtype.kind != "f":
            raise FormatError(
                f"{path}: logits {list(logits.shape)} of {logits.dtype}; expected "
                f"{[*ids.shape, vocab]} of floats"
            )
    shift = _shift_of(path, ids, labels, mask)
    return Batch(path, *_aligned(ids, labels, mask, shift), mask, shift, logits)


def _read(file: NpzFile, name: str, known: tuple[str, ...]) -> Numbers | None:
    there = [key for key in known if key in file.arrays]
    if len(there) > 1:
        raise FormatError(f"{file.path}: holds {' and '.join(there)}; expected one array of {name}")
    return file.read(there[0]) if there else None


def _integers(
    path: Path, name: str, values: Numbers, shape: tuple[int, ...] | None = None
) -> NDArray[np.int64]:
    wide = values[None] if values.ndim == 1 else values
    kinds = "iub" if name == "mask" else "iu"
    if wide.dtype.kind not in kinds or wide.ndim != 2 or not wide.size:
        raise FormatError(
            f"{path}: {name} {list(values.shape)} of {values.dtype}; expected integers "
            "[samples, tokens]"
        )
    if shape is not None and wide.shape != shape:
        raise FormatError(f"{path}: {name} {list(wide.shape)}; ids are {list(shape)}")
    return wide.astype(np.int64)


def _inside(path: Path, ids: NDArray[np.int64], vocab: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise FormatError(
            f"{path}: token id {low if low < 0 else high}; the embedding has {vocab} rows"
        )


def _shift_of(
    path: Path, ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_]
) -> int:
    """Return how far ahead of its place a label's token stands: 0 or 1, or a mistake of the file.

    Only labels of no padding count. FormatError where no distance fits all of them.
    """
    wrong: dict[int, tuple[int, int]] = {}
    for shift in SHIFTS:
        there, here = _pairs(ids, labels, mask, shift)
        off = np.argwhere((here >= 0) & (here != there))
        if not len(off):
            return shift
        wrong[shift] = (int(off[0][0]), int(off[0][1]))
    sample, at = wrong[0]
    raise FormatError(
        f"{path}: label {labels[sample, at]} at token {at} of sample {sample} is neither that "
        f"token ({ids[sample, at]}) nor the next; expected labels that are the ids, or the ids "
        "one ahead, with -100 where nothing is scored"
    )


def _pairs(
    ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_], shift: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (tokens, labels) that stand against each other under a shift, ends cut off."""
    kept = np.where(mask, labels, -100)
    if shift < 0:
        return ids[:, :shift], kept[:, -shift:]
    stop = ids.shape[1] - shift
    return ids[:, shift:], kept[:, :stop]


def _aligned(
    ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_], shift: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids with the one after the last, and which of them are labels."""
    samples, tokens = ids.shape
    longer = np.concatenate([ids, np.full((samples, 1), -1, np.int64)], 1)
    label = np.zeros(longer.shape, bool)
    valid = (labels >= 0) & mask
    for at in range(tokens):
        to = at + shift
        if 0 <= to <= tokens:
            label[:, to] = valid[:, at]
            if to == tokens:
                longer[:, to] = np.where(valid[:, at], labels[:, at], -1)
    label[:, 0] &= shift == 0  # no row predicts the first token; the mask of it is kept
    return longer, label


def score(batch: Batch, session: Session | None) -> Iterator[Scored]:
    """Yield each sample's losses, by the model's own pass or, without one, the file's logits.

    Padding is left out of the model's pass: positions count from the first token of the mask.
    """
    for sample in range(len(batch.mask)):
        ids, mask = batch.ids[sample], batch.mask[sample]
        if session is None:
            assert batch.logits is not None
            rows = log_rows([batch.logits[sample]], ids, 0)
            yield Scored(rows, rows)
            continue
        inside = np.flatnonzero(mask)
        whole = np.full((AHEAD, batch.tokens), np.nan)
        if not len(inside):
            yield Scored(whole, _run(session, ids, 0, batch.tokens))
            continue
        first, stop = int(inside[0]), int(inside[-1]) + 1
        nats = whole.copy()
        nats[:, first:stop] = _run(session, ids, first, stop)
        padded = stop - first < batch.tokens
        yield Scored(nats, _run(session, ids, 0, batch.tokens) if padded else nats)


def _run(session: Session, ids: NDArray[np.int64], first: int, stop: int) -> Numbers:
    """Return losses [AHEAD, stop - first] of a pass over tokens [first, stop)."""
    most = rows_at_once(int(session.hp["vocab_size"]))
    tokens = [int(i) for i in ids[first:stop]]
    return log_rows(session.in_parts(tokens, range(len(tokens)), most), ids, first)


def log_rows(parts: Any, ids: NDArray[np.int64], first: int) -> Numbers:
    """Return losses [AHEAD, rows]; entry k of the row of token t is the loss of token t + k."""
    found = []
    at = first
    for part in parts:
        logs = log_probabilities(np.asarray(part))
        losses = np.full((AHEAD, len(logs)), np.nan)
        for ahead in range(AHEAD):
            targets = ids[at + ahead : at + ahead + len(logs)]
            rows = np.flatnonzero(targets >= 0)
            losses[ahead, rows] = -logs[rows, targets[rows]]
        found.append(losses)
        at += len(logs)
    if not found:
        raise UsageError("no tokens to run; give at least one")
    result: Numbers = np.concatenate(found, 1)
    return result
