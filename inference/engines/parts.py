"""Arrays whose width is not the point's: padded vocabularies, and what one rank of several holds.

A *part* is some columns or rows of a point's value, as one rank of several has them.

An engine pads the rows of its head to a multiple of a block or of its ranks, so that logits have
columns after the vocabulary. With tensor parallelism a rank holds some columns, with sequence
parallelism some rows.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.points import POINTS

Numbers = NDArray[Any]
ALIKE = 0.1  # relative distance below which a part is taken for that part of a point


def has_vocabulary_axis(point: str) -> bool:
    """Return whether a capture point has a column for each token of the vocabulary."""
    return POINTS[point].shape.replace(" ", "").endswith(",vocab_size")


def cut_to_vocabulary(values: Numbers, vocab: int) -> tuple[Numbers, str]:
    """Return (the columns of the vocabulary, a remark on columns after them; "" for padding).

    Padding is one number in all columns, 0 or minus infinity with most engines. ValueError where
    columns are missing.
    """
    width = values.shape[-1]
    if width < vocab:
        raise ValueError(
            f"{width} of the {vocab} columns of the vocabulary{_rank_text(width, vocab)}"
        )
    padding = values[..., vocab:]
    constant = not padding.size or bool((padding == padding.flat[0]).all())
    said = "" if constant else f"columns {vocab} to {width - 1} are after the vocabulary"
    return values[..., :vocab], said


def _rank_text(part: int, whole: int) -> str:
    """Return ", as one rank of N has them ..." for an array with 1/N of a point's columns.

    `part` are the array's columns, `whole` the point's. "" if they do not divide.
    """
    return "" if not part or whole % part else one_rank_text(whole // part)


def one_rank_text(ranks: int) -> str:
    """Return the end of a message about columns that only one of `ranks` ranks has."""
    return f", as one rank of {ranks} has them: put the ranks' columns together"


def part_text(
    values: Numbers, own: Mapping[str, Numbers], named: Collection[str], tokens: int
) -> str:
    """Return in words which part of a point an array is, such as a rank's; "" if none is found.

    `own` are the model's values by key, [tokens, width]. `named` are the keys that the array's name
    says; without one it is compared with the logits. `tokens` is the number of tokens.
    """
    # Only arrays of two axes can be a rank's share.
    rows = values
    while rows.ndim > 2 and rows.shape[0] == 1:
        rows = rows[0]
    if rows.ndim != 2 or not rows.size or rows.dtype.kind != "f":
        return ""
    keys = [key for key in named if key in own] or [
        key for key in own if has_vocabulary_axis(key.rpartition(".")[2])
    ]
    # Compare with the shares of each named point, or of the logits.
    for key in keys:
        mine = own[key].reshape(len(own[key]), -1)
        found = _matched_share_text(rows, mine, key, 1) or _matched_share_text(rows, mine, key, 0)
        if found:
            return found
        width = mine.shape[1]
        if key in named and rows.shape[1] != width:
            return f"{rows.shape[1]} columns; {key} has {width}"
        if key in named and len(rows) not in (1, tokens):
            return f"{len(rows)} rows for {tokens} tokens"
    return ""


def _matched_share_text(rows: Numbers, mine: Numbers, key: str, axis: int) -> str:
    """Return in words which rank's columns or rows of point `key` an array is; "" if none's.

    `rows` is the array, `mine` the model's whole value, both [tokens, width]. Ranks divide axis
    `axis`. A single row is no rank's: it is the last token's.
    """
    part, whole = rows.shape[axis], mine.shape[axis]
    least = 2 if axis == 0 else 1
    if rows.shape[1 - axis] != mine.shape[1 - axis] or not least <= part < whole or whole % part:
        return ""
    # The nearest share must be near.
    away = [finite_distance(rows, share) for share in np.split(mine, whole // part, axis)]
    rank = int(np.argmin(away))
    if away[rank] > ALIKE:
        return ""
    first, word = rank * part, ("rows", "columns")[axis]
    return (
        f"{word} {first} to {first + part - 1} of the {whole} of {key}: rank {rank} of "
        f"{whole // part}; put the ranks' {word} together"
    )


def finite_distance(theirs: Numbers, mine: Numbers) -> float:
    """Return the relative L2 distance of the values that are finite in both."""
    x, y = theirs.astype(np.float64), mine.astype(np.float64)
    both = np.isfinite(x) & np.isfinite(y)
    x, y = np.where(both, x, 0), np.where(both, y, 0)
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))
