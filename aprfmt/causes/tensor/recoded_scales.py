"""Scales of a packed weight that were rewritten by one rule: inverted, squared or exchanged.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. Both files
pack the weight alike, and nothing but the numbers of some scales differs. The scales may be few
bytes, as the one scale of a whole tensor is, so they are asked before damage.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.codecs import decode
from aprfmt.codecs.dialect import OF_INPUTS, SMALL
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof
from aprfmt.tensors.runs import hold_same_bytes

if TYPE_CHECKING:
    from aprfmt.base.protocols import LazyTensor
    from aprfmt.codecs.base import Array

MOST = 1 << 24  # numbers of a scale part that are looked at
ROUNDINGS = 1.5  # roundings to both sides' types that a rewritten number may be off by
FLIPPED = 2  # bits of a single number that damage may turn; more were written
EXACT = 0.0  # rounding of a type that holds powers of two only


class ScaleRule(NamedTuple):
    """A rule that may have changed every scale: its words, and a function of A's numbers."""

    says: str
    of: "Callable[[Array], Array]"


RULES = (
    ScaleRule("inverted: 1/s stands for s", lambda s: 1.0 / s),
    ScaleRule("the squares of A's: s*s stands for s", np.square),
    ScaleRule("the square roots of A's", lambda s: np.sqrt(np.abs(s))),
)


class ScalePart(NamedTuple):
    """The scales of a packed weight in both files (float64, flat), and how each file stores them.

    `shape` is B's.
    """

    name: str
    x: "Array"
    y: "Array"
    units: tuple[float, float]
    bits: int
    flipped: int
    shape: tuple[int, ...]

    @property
    def slack(self) -> float:
        """Relative distance within which a scale of B counts as what a rule makes of A's."""
        return ROUNDINGS * sum(self.units)

    @property
    def near_bits(self) -> float:
        """Bits of evidence from one number that agrees only within `slack`.

        It is 1.0 for values without a rounding unit.
        """
        return self.bits - float(np.log2(self.slack / self.units[1])) if self.units[1] else 1.0


def explain_recoded_scales(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that some scales are a function of A's scales and all else is equal."""
    a, b = case.a.side, case.b.side
    if len(a.stored) != len(b.stored) or a.encoding != b.encoding:
        return
    found: list[ScalePart] = []
    for left, right in zip(a.stored, b.stored, strict=True):
        pairs = _pair_parts(left.parts, right.parts)
        if pairs is None:
            return
        for before, after in sorted(pairs, key=lambda pair: pair[0].info.nbytes):  # codes last
            if hold_same_bytes(before, after):
                continue
            part = _scale_part(before, after)
            if part is None:
                return
            if (part.x != part.y).any():
                found.append(part)
    if not found:
        return
    told = _explaining_rule(found) or _explaining_move(found) or _explaining_factor(found)
    if told is None:
        return
    says, proof = told
    names = dict.fromkeys(part.name.rsplit(".", 1)[-1] for part in found)
    whole = ", the scale of the whole tensor," if all(part.x.size == 1 for part in found) else ""
    first = found[0]
    at = np.flatnonzero(first.x != first.y)
    few = f", and {len(at)} of {first.x.size} numbers differ" * (len(at) < first.x.size)
    yield make_finding(
        "quant_scale",
        (case.key,),
        (
            f"B's {' and '.join(names)}{whole} {says}; all other bytes of its parts are equal",
            f"{first.name} has {first.y[at[0]]:.6g} where A has {first.x[at[0]]:.6g}{few}",
        ),
        case.before.relative,
        0.0,
        proof,
    )


def _pair_parts(
    a: "Mapping[str, LazyTensor]", b: "Mapping[str, LazyTensor]"
) -> "list[tuple[LazyTensor, LazyTensor]] | None":
    """Return (A's part, B's part) for the parts of two packed weights, without scales of inputs.

    A scale with two names is paired if it is the only part without a counterpart. None where a part
    has no counterpart.
    """
    mine, theirs = ({k: v for k, v in parts.items() if not OF_INPUTS.search(k)} for parts in (a, b))
    pairs = [(mine.pop(suffix), theirs.pop(suffix)) for suffix in list(mine) if suffix in theirs]
    left = (*mine, *theirs)
    if not left:
        return pairs
    if len(mine) == len(theirs) == 1 and all("scale" in suffix for suffix in left):
        return [*pairs, (mine.popitem()[1], theirs.popitem()[1])]
    return None


def _scale_part(a: "LazyTensor", b: "LazyTensor") -> ScalePart | None:
    """Return the numbers of a differing scale part; None for codes and for other shapes."""
    kinds = a.info.encoding, b.info.encoding
    named = all("scale" in part.info.name.rsplit(".", 1)[-1] for part in (a, b))
    known = all(kind in UNIT or kind in SMALL for kind in kinds)
    if not (named and known) or max(np.prod(a.info.shape), np.prod(b.info.shape)) > MOST:
        return None
    x, y = (_numbers(part) for part in (a, b))
    if x.size != y.size or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    flipped = 0
    # One number alone may be damage: in how many bits it differs is asked then.
    if x.size == 1 and kinds[0] == kinds[1] and a.info.nbytes == b.info.nbytes:
        raw = (np.frombuffer(part.raw(), np.uint8) for part in (a, b))
        flipped = int(np.unpackbits(next(raw) ^ next(raw)).sum())
    units = tuple(UNIT.get(kind, EXACT) for kind in kinds)
    bits = 8 * b.info.nbytes // max(1, y.size)
    return ScalePart(b.info.name, x, y, (units[0], units[1]), bits, flipped, b.info.shape)


def _numbers(part: "LazyTensor") -> "Array":
    """Return a scale part's numbers as stored (float64, flat)."""
    info = part.info
    small = SMALL.get(info.encoding)
    if small is not None:
        return np.asarray(small.values[np.frombuffer(part.raw(), np.uint8)], np.float64)
    return np.asarray(decode(info.encoding, part.raw(), info.shape), np.float64).reshape(-1)


def _explaining_rule(found: list[ScalePart]) -> tuple[str, Proof] | None:
    """Return (words, proof) of the rule that explains every differing scale; or None."""
    for rule in RULES:
        bits, changed, total = float("inf"), 0, 0
        for part in found:
            moved = part.x != part.y
            with np.errstate(all="ignore"):
                made = rule.of(part.x[moved])
            wanted = part.y[moved]
            off = np.abs(made - wanted)
            if not (off <= part.slack * np.abs(wanted)).all() or not wanted.all():
                break
            exact = (off <= part.units[1] * np.abs(wanted)).all()
            bits = min(bits, float(part.bits) if exact else part.near_bits)
            changed, total = changed + int(moved.sum()), total + part.x.size
        else:
            verb = "is" if total == 1 else "are"
            return f"{verb} {rule.says}", Proof(changed, 1.0, 0, bits)
    return None


def _explaining_move(found: list[ScalePart]) -> tuple[str, Proof] | None:
    """Return (words, proof) of the exchange that explains every differing scale; or None.

    A grid may be transposed, or two numbers, rows or columns of it exchanged. Other orders of the
    numbers are left to the comparison of values.
    """
    moves = {_exchange_text(part) for part in found}
    if len(moves) != 1 or "" in moves:
        return None
    changed = sum(int((part.x != part.y).sum()) for part in found)
    return f"are A's {moves.pop()}", Proof(changed, 1.0, 0, float(min(p.bits for p in found)))


def _exchange_text(part: ScalePart) -> str:
    """Return in words which exchange of scales explains B's numbers; "" if none does."""
    x, y = part.x, part.y
    columns = part.shape[-1] if len(part.shape) > 1 else 1
    if not np.array_equal(np.sort(x), np.sort(y)) or not columns:
        return ""
    rows = x.size // columns
    if min(rows, columns) > 1 and np.array_equal(x.reshape(rows, columns).T.reshape(-1), y):
        return "transposed"
    at = np.flatnonzero(x != y)
    if len(at) == 2:
        places = " and ".join(str([int(i) for i in np.unravel_index(n, part.shape)]) for n in at)
        return f"with those at {places} exchanged"
    for axis, what in ((1, "rows"), (0, "columns")):
        one, other = (values.reshape(rows, columns) for values in (x, y))
        moved = np.flatnonzero((one != other).any(axis)).tolist()
        if len(moved) == 2 and np.array_equal(
            np.take(one, moved[::-1], 1 - axis), np.take(other, moved, 1 - axis)
        ):
            return f"with {what} {moved[0]} and {moved[1]} exchanged"
    return ""


def _explaining_factor(found: list[ScalePart]) -> tuple[str, Proof | None] | None:
    """Return (words, proof) of one factor on all scales of the weight; or None.

    A single number proves no factor: then the words say only that another number is there, where
    more of its bits differ than damage flips.
    """
    x, y = (np.concatenate([getattr(part, side) for part in found]) for side in ("x", "y"))
    if not x.all() or not y.all() or (x == y).any():
        return None  # the factor of some scales alone is other scales
    ratio = y / x
    slack = max(part.slack for part in found)
    if abs(ratio[0] - 1) <= 2 * slack or (np.abs(ratio / ratio[0] - 1) > 2 * slack).any():
        return None
    if ratio.size > 1:
        bits = min(part.near_bits for part in found)
        return f"are each {ratio[0]:.6g} times A's", Proof(ratio.size, 1.0, 1, bits)
    if all(part.flipped <= FLIPPED for part in found):
        return None
    return f"is another number, {ratio[0]:.6g} times A's", None


HYPOTHESES = (
    PairHypothesis(
        ("quant_scale",),
        explain_recoded_scales,
        66,
        "a rule of few bytes, before damage of them",
        facts=("companion tensors",),
    ),
)
