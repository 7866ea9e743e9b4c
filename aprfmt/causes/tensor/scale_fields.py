"""Blocks of two quantized tensors whose codes are equal and whose 16-bit scales are not.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A quantization made anew has other codes. So the scales were changed alone: their bits were written
as another type's or as reciprocals, which is made again bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import either_side_text, make_finding
from aprfmt.codecs import CODECS
from aprfmt.codecs.bf16 import round_to_bf16
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

FLOAT = np.dtype("<f2")  # of a block's scale, and of its minimum
FEW = 16  # blocks with other scales below which they are damage

Rewrite = Callable[["Array"], "Array"]  # float16 numbers -> uint16 bits


@dataclass(frozen=True)
class _Fields:
    """The fields of two tensors' blocks: which differ, and their numbers in both.

    `a` and `b` are {field: float16 [blocks]} of those that differ. `blocks` is the number of all,
    `apart` of those that differ.
    """

    a: dict[str, "Array"]
    b: dict[str, "Array"]
    blocks: int
    apart: int


def explain_rewritten_scales(case: DifferingPair) -> Iterator[Finding]:
    """Yield at most one finding: quantized codes are equal, and one side's scales were rewritten.

    A rewriting is one of _REWRITES, such as float16 scales stored as BF16 bits or as reciprocals;
    it must give every bit of the other side's scales.
    """
    fields = _float_fields_alone(case)
    if fields is None:
        return
    for says, rewrite in _REWRITES.items():
        sides = (("B", fields.a, fields.b), ("A", fields.b, fields.a))
        made = [
            side
            for side, right, wrong in sides
            if all((rewrite(right[name]) == wrong[name].view("<u2")).all() for name in right)
        ]
        if made:
            yield _scale_finding(case, fields, f"{made[0]} holds {says}", made)
            return


def explain_other_scales(case: DifferingPair) -> Iterator[Finding]:
    """Yield at most one finding: quantized codes are equal, and B's scales are not A's.

    It says where the tensors differ, not what was done.
    """
    fields = _float_fields_alone(case)
    if fields is not None:
        yield _scale_finding(case, fields, "B holds other numbers", ())


def _scale_finding(
    case: DifferingPair, fields: _Fields, says: str, sides: Sequence[str]
) -> Finding:
    """Return the finding that two tensors have equal codes and other scales.

    `says` is what one file holds in place of the scales. `sides` are the files, "A" or "B", whose
    scales can be made from the other's, bit for bit (of two, either may be wrong); empty if none
    can.
    """
    cause = "quant_min" if set(fields.a) <= {"m", "dmin"} else "quant_scale"
    text = f"the codes are equal, and {says} for the scales of blocks ({' and '.join(fields.a)})"
    either = len(sides) > 1
    if either:
        text += either_side_text(f"{sides[0]}'s", "scales are")
    line = f"in {fields.apart} of {fields.blocks} blocks of {case.a.encoding}"
    proof = unfitted_proof(fields.apart) if sides else None
    after = 0.0 if sides else None
    before, known = case.before.relative, bool(sides)
    found = make_finding(cause, (case.key,), (text, line), before, after, proof, confirmed=known)
    return replace(found, side=sides[0] if len(sides) == 1 else "", leaves_side_open=either)


def _float_fields_alone(case: DifferingPair) -> _Fields | None:
    """Return the float16 fields (scales) in which two quantized tensors differ, else None.

    None if any other field of the blocks differs, too few blocks differ, or the two encodings or
    shapes are not the same.
    """
    a, b = case.a, case.b
    codec = CODECS.get(a.encoding)
    layout = None if codec is None else codec.layout
    if a.encoding != b.encoding or layout is None or not layout.names or a.shape != b.shape:
        return None
    if not (a.decodes_rows and b.decodes_rows) or case.numbers is not None:
        return None
    size = a.row_bytes
    if not size or size % layout.itemsize or b.row_bytes != size:
        return None
    floats = [name for name in layout.names if layout[name] == FLOAT]
    others = [name for name in layout.names if name not in floats]
    found: dict[str, tuple[list[Array], list[Array]]] = {name: ([], []) for name in floats}
    for rows in case.windows(None):
        x, y = (np.ascontiguousarray(side.raw(rows)).reshape(-1).view(layout) for side in (a, b))
        if any(not np.array_equal(x[name], y[name]) for name in others):
            return None
        for name in floats:
            for held, blocks in zip(found[name], (x, y), strict=True):
                held.append(blocks[name].copy())
    joined = {name: tuple(np.concatenate(parts) for parts in pair) for name, pair in found.items()}
    apart = {
        name: first.view("<u2") != second.view("<u2") for name, (first, second) in joined.items()
    }
    moved = [name for name, differs in apart.items() if differs.any()]
    if not moved:
        return None
    some = np.logical_or.reduce([apart[name] for name in moved])
    if int(some.sum()) < FEW:
        return None
    return _Fields(
        {name: joined[name][0] for name in moved},
        {name: joined[name][1] for name in moved},
        len(some),
        int(some.sum()),
    )


def _as_bfloat16(numbers: "Array") -> "Array":
    """Return float16 numbers rounded to BF16 (to even), as its uint16 bits."""
    return (round_to_bf16(numbers.astype(np.float32).view(np.uint32)) >> 16).astype("<u2")


def _as_cut_bfloat16(numbers: "Array") -> "Array":
    """Return float16 numbers truncated to BF16, as its uint16 bits."""
    return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")


def _as_reciprocals(numbers: "Array") -> "Array":
    """Return 1 / x of float16 numbers x in float16, as its uint16 bits; 0 stays 0."""
    wide = numbers.astype("<f4")
    with np.errstate(all="ignore"):
        found = np.where(wide != 0, 1 / wide, 0).astype("<f2")
    return found.view("<u2")


_REWRITES: dict[str, Rewrite] = {
    "the bits of BF16 numbers": _as_bfloat16,
    "the bits of BF16 numbers that were cut": _as_cut_bfloat16,
    "the reciprocals": _as_reciprocals,
}

HYPOTHESES = (
    PairHypothesis(
        ("quant_scale", "quant_min"),
        explain_rewritten_scales,
        95,
        "equal codes under rewritten scales, before what fits factors to values",
        facts=("blocks",),
    ),
    PairHypothesis(
        ("quant_scale", "quant_min"),
        explain_other_scales,
        306,
        "equal codes under other scales, before values that nothing relates",
        facts=("blocks",),
    ),
)
