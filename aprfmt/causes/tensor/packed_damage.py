"""Damage in a packed weight's stored parts: a few bytes of its codes, scales or zero points.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. Both files
pack the weight alike, and every part has equal bytes except for short ranges (*runs*). What such a
range does to the values can look like another quantizer's rounding, or other scales; it is neither.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.protocols import LazyTensor
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.overwritten_bytes import join_places
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.measure.findings import Finding

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

RUNS = 3  # runs of differing bytes in all parts together
GAP = 16  # equal bytes that end a run
SHORT = 64  # bytes that a run may have where rows are shorter
STEP = 8 << 20


class DamagedRun(NamedTuple):
    """Differing bytes [start, stop) of a stored tensor.

    `bits` is how many bits differ; `zero`: B's bytes are all zero.
    """

    part: LazyTensor
    start: int
    stop: int
    bits: int
    zero: bool
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]

    def says(self) -> str:
        """Return the run as a line of evidence; byte numbers count from the file's start."""
        name, at = self.part.info.name, self.part.info.offset + self.start
        if self.stop - self.start == 1:
            return f"byte {at} of {name}: {self.bits} bit{'s' if self.bits > 1 else ''} differ"
        held = ", all zero in B" if self.zero else ""
        return f"bytes {at} to {at + self.stop - self.start - 1} of {name}{held}"


def explain_damaged_parts(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that packed weights are equal but for a few short runs of bytes."""
    a, b = case.a.side, case.b.side
    if len(a.stored) != 1 or len(b.stored) != 1 or a.encoding != b.encoding:
        return
    found: list[DamagedRun] = []
    for suffix, part in b.parts.items():
        other = a.parts.get(suffix)
        if other is None or (other.info.encoding, other.info.shape) != (
            part.info.encoding,
            part.info.shape,
        ):
            return
        runs = _differing_runs(other, part)
        if runs is None or len(found) + len(runs) > RUNS:
            return
        found += runs
    if not found or len(a.parts) != len(b.parts):
        return
    said = "all other bytes of its parts are equal: damage or an edit, no transformation"
    if _are_exchanged(found):
        said = "values are exchanged, each is as it was; all other bytes of its parts are equal"
    yield make_finding(
        "bit_rot",
        (case.key,),
        (said, *(run.says() for run in found)),
        case.before.relative,
        0.0,
        None,
    )


def _differing_runs(a: LazyTensor, b: LazyTensor) -> list[DamagedRun] | None:
    """Return the runs of bytes that differ in a part; None if they are too many or too long."""
    info = b.info
    size = info.nbytes
    if a.info.nbytes != size:
        return None
    line = size // info.shape[0] if info.shape and info.shape[0] else size
    longest = max(SHORT, line)

    def differing_places() -> "Iterator[Array]":
        """Yield the offsets of bytes in which `a` and `b` differ, ascending, by windows."""
        for start in range(0, size, STEP):
            stop = min(size, start + STEP)
            x, y = (np.frombuffer(side.raw(start, stop), np.uint8) for side in (a, b))
            yield np.flatnonzero(x != y) + start

    # Join near bytes to runs; long runs are no damage.
    places = join_places(differing_places(), GAP, RUNS)
    if places is None:
        return None
    found = []
    value = encoding_row(info.encoding).type_size
    for start, stop in places:
        if stop - start > longest or (stop - start > 8 and 2 * (stop - start) > size):
            return None
        x, y = (np.frombuffer(side.raw(start, stop), np.uint8) for side in (a, b))
        bits = int(np.unpackbits(x ^ y).sum())
        ends = start // value * value, -(-stop // value) * value
        x, y = (np.frombuffer(side.raw(*ends), f"V{value}") for side in (a, b))
        apart = [(m.tobytes(), n.tobytes()) for m, n in zip(x, y, strict=True) if m != n]
        before, after = zip(*apart, strict=True)
        found.append(DamagedRun(b, start, stop, bits, not y.any(), before, after))
    return found


def _are_exchanged(runs: list[DamagedRun]) -> bool:
    """Return whether B has A's bytes in every part, only at other offsets."""
    parts = {run.part.info.name for run in runs}
    return all(
        sorted(x for run in runs if run.part.info.name == name for x in run.before)
        == sorted(x for run in runs if run.part.info.name == name for x in run.after)
        for name in parts
    )


HYPOTHESES = (
    PairHypothesis(
        ("bit_rot",),
        explain_damaged_parts,
        70,
        "damaged parts, before what decodes a packed weight",
        facts=("companion tensors",),
    ),
)
