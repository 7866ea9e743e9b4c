"""Signs of packed values that are flipped, lost or reordered, while the magnitudes are right.

A *block* is a quantization block. A sign is *turned* if it is flipped. A and B are the two files
that are compared; a *side* is one of them, or its tensor. A *guess* is a change of one tensor of a
pair after which both should be equal.

Types of three bits and fewer store signs apart from magnitudes (a grid of magnitudes and a byte of
signs for eight values) or have no other levels (-1, 0, 1). So the signs can be wrong while all
magnitudes are right: a block then is no damaged one, and points away from the right one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Finding, Guess, PairHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "quant_signs", "tensor", "bug",
        "Signs of a packed weight are turned, lost or in another order; the magnitudes, which its "
        "type stores apart, are right.",
        "Blocks whose magnitudes agree with the other side's while their values do not.",
        "With the signs turned, or in the named order, the values are within the type's rounding.",
    ),
)  # fmt: skip

TYPES = ("IQ1_", "IQ2_", "IQ3_", "TQ1_", "TQ2_")  # begin the names of types with signs apart
GROUP = 8  # values whose signs stand in one byte
MOST = 1 << 24  # elements of a tensor that is looked at
ALIKE = 0.75  # cosine of the magnitudes from which they are right
AWAY = -0.5  # ... of the values at most, where all signs of a block are turned
HALF = 0.5  # ... where they are lost or in another order
SURE = 0.8  # share of the signs that an order must put right
BLOCKS = 8  # by which it is judged which places of a block are turned
SHOWN = 4
ENOUGH = 64  # values that are not zero by which an order is judged


def guess_block_signs(case: DifferingPair) -> Iterator[Guess | Finding]:
    """Yield guesses that signs of blocks are flipped, or reordered within every eight values."""
    if case.numbers is not None or case.a.shape != case.b.shape:
        return
    for reader, other, label in ((case.b, case.a, "B"), (case.a, case.b, "A")):
        if not reader.encoding.startswith(TYPES) or reader.size > MOST:
            continue
        size = encoding_row(reader.encoding.split("+")[0]).block_size
        if reader.columns % size:
            continue
        every = np.arange(reader.rows)
        x, y = (to_float64(side.take(every)).reshape(-1, size) for side in (other, reader))
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        length = np.maximum(np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1), 1e-300)
        values = (x * y).sum(axis=1) / length
        right = np.abs(x * y).sum(axis=1) / length > ALIKE
        turned = right & (values < AWAY)
        if turned.all():
            yield _all_turned(case, reader, label)
            return
        if turned.any():
            yield from _turned_blocks(case, reader, label, turned, x[turned], y[turned])
            return
        wrong = right & (values < HALF)
        placed = wrong if wrong.any() else right
        yield from _flipped_signs(case, reader, label, placed, x[placed], y[placed])
        if wrong.any():
            yield from _guess_sign_order(case, reader, label, wrong, x[wrong], y[wrong])
            return


def _all_turned(case: DifferingPair, reader: RowReader, label: str) -> Guess:
    """Return the guess that all signs of a side are flipped."""
    says = (f"all signs of {label} are turned", reader.encoding)
    return case.guess("quant_signs", says, label, lambda rows: -to_float64(reader.take(rows)))


def _turned_blocks(
    case: DifferingPair, reader: RowReader, label: str, turned: "Array", x: "Array", y: "Array"
) -> Iterator[Finding]:
    """Yield the finding that all signs of some blocks are flipped, if that explains these blocks.

    `turned` (bool [blocks]) are those blocks, `x` and `y` their right and stored values.
    """
    first = np.argwhere(turned.reshape(reader.rows, -1))[0]
    text = f"the signs of whole blocks of {label} are turned, their magnitudes are right"
    where = (
        f"{int(turned.sum())} of {turned.size} blocks of {reader.encoding}, the first in row "
        f"{first[0]}, block {first[1]}"
    )
    yield from _find_flipped_signs(case, x, y, int(turned.sum()), (text, where))


def _flipped_signs(
    case: DifferingPair, reader: RowReader, label: str, wrong: "Array", x: "Array", y: "Array"
) -> Iterator[Finding]:
    """Yield the finding that the signs of values number i, j, ... of some blocks are flipped.

    `wrong` (bool [blocks]) are those blocks, `x` and `y` their right and stored values. Only the
    values with these numbers are judged.
    """
    length = np.linalg.norm(x, axis=0) * np.linalg.norm(y, axis=0)
    agree = (x * y).sum(axis=0) / np.maximum(length, 1e-300)
    turned = agree < AWAY
    if len(x) < BLOCKS or not turned.any() or not (turned | (agree > -AWAY)).all():
        return
    edges = np.flatnonzero(np.diff(turned, prepend=False, append=False)).reshape(-1, 2)
    shown = ", ".join(
        f"{start}-{stop - 1}" if stop - start > 1 else str(start)
        for start, stop in edges[:SHOWN].tolist()
    )
    more = f" and {len(edges) - SHOWN} more runs" if len(edges) > SHOWN else ""
    text = f"the signs of {label} are turned at places {shown}{more} of every {turned.size} values"
    where = f"{len(x)} of {wrong.size} blocks of {reader.encoding}"
    yield from _find_flipped_signs(case, x[:, turned], y[:, turned], turned.size, (text, where))


def _find_flipped_signs(
    case: DifferingPair, x: "Array", y: "Array", free: int, says: tuple[str, str]
) -> Iterator[Finding]:
    """Yield the finding that stored values `y` are the right ones, `x`, with flipped signs.

    Nothing unless -y equals `x` within rounding. No other value of the tensor is judged. `free` is
    how many signs were read from these values; `says` is (what happened, where).
    """
    size = norms.exact_norm(x) or 1.0
    before, after = norms.exact_norm(y - x) / size, norms.exact_norm(-y - x) / size
    if after > case.slack():
        return
    text, where = says
    distances = f"relative distance {before:.3g} there, {after:.3g} with them turned back"
    proof = prove_values(y, y.size, free, case.slack())
    yield make_finding(
        "quant_signs",
        (case.key,),
        (text, f"{where}; {distances}"),
        case.before.relative,
        0.0,
        proof,
    )


def _guess_sign_order(
    case: DifferingPair, reader: RowReader, label: str, wrong: "Array", x: "Array", y: "Array"
) -> Iterator[Guess]:
    """Yield the guess that the signs of every eight values of some blocks are in another order.

    `wrong` (bool [blocks]) are those blocks, `x` and `y` their right and stored values.
    """
    ours, theirs = (np.sign(values).reshape(-1, GROUP) for values in (x, y))
    if np.count_nonzero(theirs) < ENOUGH or (theirs >= 0).all():
        return
    both = (ours[:, :, None] * theirs[:, None, :]).sum(axis=0)
    counted = np.abs(ours[:, :, None] * theirs[:, None, :]).sum(axis=0)
    agree = (both / np.maximum(counted, 1) + 1) / 2
    order = agree.argmax(axis=1)
    if len(set(order.tolist())) < GROUP or (agree.max(axis=1) < SURE).any():
        return
    blocks = wrong.reshape(reader.rows, -1)

    def take(rows: "Array") -> "Array":
        """Return rows of one side with the signs in the wrong blocks put in order.

        `rows` are row numbers. Signs are reordered among every eight values.
        """
        values = to_float64(reader.take(rows)).reshape(len(rows), blocks.shape[1], -1, GROUP)
        signs = np.where(np.signbit(values), -1.0, 1.0)[..., order]
        put = np.abs(values) * signs
        found: Array = np.where(blocks[rows][..., None, None], put, values)
        return found.reshape(len(rows), -1)

    says = (
        f"the signs of {label} stand in another order in every {GROUP} values: that of each is at "
        f"{[int(at) for at in order]}"
    )
    where = f"{int(wrong.sum())} of {wrong.size} blocks of {reader.encoding}"
    yield case.guess("quant_signs", (says, where), label, take, free=GROUP)


def guess_lost_signs(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that one side has the other's magnitudes without any sign."""
    if case.numbers is not None or case.a.shape != case.b.shape:
        return
    for reader, other, label in ((case.b, case.a, "B"), (case.a, case.b, "A")):
        if not reader.encoding.startswith(TYPES):
            continue
        sample = to_float64(reader.take(case.sample))
        if (sample < 0).any() or not sample.any():
            continue
        says = f"the signs of {label} are lost: its values are the other side's magnitudes"
        away = "A" if label == "B" else "B"

        def take(rows: "Array", other: RowReader = other) -> "Array":
            """Return the magnitudes of the other side's rows; `rows` are row numbers."""
            return np.abs(to_float64(other.take(rows)))

        yield case.guess("quant_signs", (says, reader.encoding), away, take)
        return


HYPOTHESES = (
    PairHypothesis(
        ("quant_signs",),
        guess_block_signs,
        85,
        "magnitudes that are right, before scales are fitted to them",
        facts=("blocks",),
    ),
    PairHypothesis(
        ("quant_signs",),
        guess_lost_signs,
        86,
        "magnitudes alone, before they are other rows",
        facts=("blocks",),
    ),
)
