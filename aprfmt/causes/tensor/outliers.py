"""Damage under quantization: a few values beyond the rounding bound, all others within it."""

from collections.abc import Iterator

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import accused_proof, make_finding
from aprfmt.codecs import decode
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.numbers import steps_between, to_float64
from aprfmt.measure.row_reader import RowReader
from aprfmt.measure.tensors import value_chunks

FEW = 64  # most values beyond the bound
FINE = 0.02  # largest noise of the other encoding for which a restored value proves something


def explain_outliers(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding of a few values beyond one step, and a flipped bit that explains them."""
    a, b = case.a, case.b
    if a.encoding == b.encoding or case.numbers is not None:
        return
    found = _values_beyond_step(case)
    if not found:
        return
    # List the values beyond one step.
    shape = case.shape or (1,)
    places = [[int(i) for i in np.unravel_index(at, shape)] for at, _, _ in found]
    shown = "; ".join(
        f"{place}: {x:g} | {y:g}" for place, (_, x, y) in zip(places, found, strict=True)
    )
    shown = shown if len(found) <= 4 else f"{'; '.join(shown.split('; ')[:4])} ..."
    many = f"{len(found)} value{'s' if len(found) > 1 else ''}"
    says: tuple[str, ...] = (
        "all other values are within one step of the encodings: damage or an edit, no "
        "transformation",
        f"{many} of {case.before.count} further apart: {shown}",
    )
    # One flipped bit of either side may explain all of them.
    for label, side, other in (("B", b, a), ("A", a, b)):
        bit = flipped_bit_text(side, other, [at for at, _, _ in found])
        if bit is not None:
            sure = storage_noise(other.encoding) <= FINE
            says = (*says, f"flipping {bit} of {label} brings it back within the bound")
            proof = accused_proof(len(found))
            yield make_finding(
                "bit_rot", (case.key,), says, case.before.relative, None, proof, confirmed=sure
            )
            return
    before = case.before.relative
    yield make_finding("bit_rot", (case.key,), says, before, None, None, confirmed=False)


def _values_beyond_step(case: DifferingPair) -> list[tuple[int, float, float]]:
    """Return (flat index, value of A, value of B) of values more than a quantization step apart.

    [] if there are none, too many, or the steps are not known.
    """
    found: list[tuple[int, float, float]] = []
    start = 0
    for x, y, steps in value_chunks(case.a.side, case.b.side):
        step = steps()
        if step is None:
            return []
        at = np.flatnonzero(steps_between(x, y, step) > 1.0)
        if len(found) + at.size > min(FEW, max(1, case.before.count // 100)):
            return []
        flat_x, flat_y = x.reshape(-1), y.reshape(-1)
        found += [(start + int(i), float(flat_x[i]), float(flat_y[i])) for i in at]
        start += x.size
    return found


def flipped_bit_text(side: RowReader, other: RowReader, at: list[int]) -> str | None:
    """Return in words the one bit whose flip makes one block of `side` equal `other`, or None.

    `at` are the flat indices of the differing values; None if they are not of one block.
    """
    row = encoding_row(side.encoding.split("+")[0])
    if row.row_header or side.row_bytes is None or len({i // row.block_size for i in at}) != 1:
        return None
    # Read the one block that holds all these places.
    flat = at[0] // row.block_size * row.block_size
    line, column = divmod(flat, side.columns)
    if side.columns > 1 and side.columns % row.block_size:
        return None
    index = np.array([line])
    raw = side.raw(index).reshape(-1, row.type_size)[column // row.block_size]
    whole = to_float64(other.take(index)).reshape(-1)
    theirs = whole[column : column + row.block_size]
    if not np.isfinite(theirs).all():
        return None  # from infinity everything is as far
    whole = whole[np.isfinite(whole)]
    # Flip each of its bits in turn and decode all variants.
    count = 8 * row.type_size
    tried = np.repeat(raw[None, :], count, axis=0)
    bits = np.arange(count)
    tried[bits, bits // 8] ^= (1 << (bits % 8)).astype(np.uint8)

    values = decode(side.encoding, {"": tried.tobytes()}, (count, row.block_size))
    values = np.nan_to_num(to_float64(values), nan=np.inf, posinf=np.inf, neginf=-np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        away = np.abs(values - theirs[None, :]).max(axis=1)
    # The nearest variant must be within the rounding of both encodings, and much nearer than the
    # block as it is: bits that change next to nothing repair nothing.
    best = int(np.argmin(away))
    held = to_float64(side.take(index)).reshape(-1)[column : column + row.block_size]
    if 2 * away[best] > np.abs(held - theirs).max():
        return None
    noise = storage_noise(side.encoding) + storage_noise(other.encoding)
    if not away[best] <= 2.0 * noise * float(np.abs(whole).max(initial=0.0)):
        return None
    tensor, offset = side.bytes.locate(
        line * side.row_bytes + column // row.block_size * row.type_size + best // 8
    )
    what = "value" if row.block_size == 1 else "block"
    place = [int(i) for i in np.unravel_index(flat, side.shape or (1,))]
    return (
        f"bit {best % 8} of byte {best // 8} of the {side.encoding} {what} at {place} "
        f"(byte {tensor.info.offset + offset} of the file, in {tensor.info.name})"
    )


HYPOTHESES = (
    PairHypothesis(
        ("bit_rot",),
        explain_outliers,
        290,
        "single values beyond a bound that holds for the others",
        facts=("two encodings",),
    ),
)
