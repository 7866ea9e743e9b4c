"""Gradients of an adapter computed with another base, or with its factors A and B exchanged."""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.training.backward_case import (
    BackwardCase,
    BackwardGuess,
    BackwardHypothesis,
    all_differ,
)
from aprfmt.causes.training.batch_samples import other_scales
from aprfmt.codecs.bnb4 import BLOCK_SIZES
from aprfmt.inference.gradients.changes import BackwardChange, FactorOrder, QuantizedBase
from aprfmt.measure.verdicts import Certainty

_MADE = "The batch's gradients, computed that way, give every parameter's."
CAUSE_ROWS = (
    Cause(
        "adapter_merged",
        "gradient",
        "bug",
        "The adapter is merged into the base and also applied, so it counts twice; or the base "
        "that was given has it merged, and the trainer's had not.",
        "All gradients of an adapter differ, and its factors B are not zero.",
        _MADE,
    ),
    Cause(
        "adapter_exchanged",
        "gradient",
        "bug",
        "The factors of the adapter are taken the other way: A for B and B for A, or the product "
        "transposed.",
        "All gradients of an adapter differ, and the shapes of its factors allow both ways.",
        _MADE,
    ),
    Cause(
        "lengths_in_graph",
        "gradient",
        "bug",
        "DoRA divides by the lengths of the rows of weight and product, which are constants in its "
        "backward; here they are none.",
        "Gradients of the factors A and B of DoRA differ, those of its magnitudes in the last "
        "layer are right.",
        _MADE,
    ),
    Cause(
        "base_quantized",
        "gradient",
        "bug",
        "The gradients of an adapter are those with another base: the one given, quantized to 4 "
        "bits as QLoRA does it.",
        "All gradients of an adapter differ, each by a few percent.",
        _MADE,
    ),
)
FIRST = 64  # elements under one scale, where nothing else is stated
LESS = 0.5  # of a difference: what another base may leave of it
CLEAR = 0.1  # of it: no other base leaves as little
ALIKE = 8.0  # times: how much further one quantization to 4 bits moves gradients than another
EQUAL = 2.0  # times the smallest distance: bases that the gradients do not tell apart


def pairs_of(case: BackwardCase) -> list[tuple[str, str]]:
    """Return (role key of factor A, role key of factor B) of each weight that an adapter changes.

    [] for a whole model.
    """
    firsts = [key for key in sorted(case.names) if key.endswith(".lora_a")]
    return [(key, key.removesuffix("a") + "b") for key in firsts]


def guess_merged(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that the adapter is merged into the trainer's base, or into the given base.

    Merged into the trainer's base it counts twice there; merged into the given base only, it
    counts twice here. Tried are the adapter's stated scale, twice that, and the scales that usual
    mistakes give.
    """
    if not pairs_of(case) or not all_differ(case):
        return
    both = "the adapter is merged into the base, and applied in addition"
    given = "the base that was given has the adapter merged, and the trainer's had not"
    yield BackwardGuess("adapter_merged", f"{both}: it counts twice", BackwardChange(merged=1.0))
    yield BackwardGuess("adapter_merged", given, BackwardChange(merged=-1.0))
    if case.adapter is None:
        return
    scale, rank = case.adapter
    others = {2 * scale: ["twice"]}
    for value, what in other_scales(scale, rank).items():
        others[value] = [*others.get(value, ()), *what]
    for value, reasons in others.items():
        text = ", or ".join(reasons)
        by = f"merged by the factor {value:.4g}: the stated {scale:.4g} {text}"
        for sign, says in ((1.0, both), (-1.0, given)):
            change = BackwardChange(merged=sign * value / scale)
            yield BackwardGuess("adapter_merged", f"{says}; {by}", change)


def guess_factor_order(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that the factors A and B are confused, or that B @ A is transposed.

    Only ways that the shapes of all pairs allow: exchanged factors have to be square, a
    transposed product belongs to a square weight.
    """
    pairs = pairs_of(case)
    if not pairs or case.missing or not all_differ(case):
        return
    shapes = [tuple(case.case(key).given.shape for key in pair) for pair in pairs]
    ways: list[tuple[FactorOrder, str]] = []
    if all(a == b and a[0] == a[1] for a, b in shapes):
        ways += [
            ("exchanged", "A is taken for B, and B for A: A @ B is added, not B @ A"),
            (
                "exchanged, gradients by name",
                "the values of A and B are exchanged in the file of the adapter",
            ),
        ]
    if all(a[1] == b[0] for a, b in shapes):
        ways.append(("transposed", "the product B @ A is added transposed"))
    for way, says in ways:
        yield BackwardGuess("adapter_exchanged", says, BackwardChange(factors=way))


def guess_lengths(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that what DoRA divides by is no constant in the backward."""
    lengths = [key for key in case.names if key.endswith(".lora_magnitude")]
    if lengths and case.right.intersection(lengths) and not case.missing:
        says = "the lengths that DoRA divides by have a gradient: they are constants in DoRA"
        yield BackwardGuess("lengths_in_graph", says, BackwardChange(lengths_in_graph=True))


def guess_quantized_base(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that the trainer's base is quantized to 4 bits, and to which encoding.

    It is the quantization that leaves the least of the differences; others that leave hardly more
    are named with it. The search ends after the first quantization if that one moves the gradients
    by another order of size than the differences: then no quantization to 4 bits gives them.
    """
    if not pairs_of(case) or case.missing or not all_differ(case):
        return
    unlike = sorted(case.wrong | case.open)
    there = distance_of_pass(case, unlike, None)
    left: dict[QuantizedBase, float] = {}
    for base in _tried_quantizations(case.base):
        change = BackwardChange(base=base)
        found = distance_of_pass(case, unlike, change)
        # Without a head of its own a base is the same with its head quantized.
        if base.parts == "layers" or found < min(left.values(), default=math.inf):
            left[base] = found
        if found <= CLEAR * there and base.nested:
            break
        if len(left) == 1 and base.parts == "layers":
            moved = distance_of_pass(case, unlike, change, "computed")
            if case.base is None and not there / ALIKE <= moved <= there * ALIKE:
                return
    best = min(left, key=lambda base: left[base])
    if best.parts == "layers" and case.base is None:
        other = replace(best, parts="layers and head")
        found = distance_of_pass(case, unlike, BackwardChange(base=other))
        if found < left[best]:
            left[other], best = found, other
    if left[best] > LESS * there:
        return
    near = [base for base in left if left[base] <= EQUAL * left[best]]
    text = ", or ".join(_base_text(base) for base in sorted(near, key=lambda one: left[one]))
    says = f"the gradients are those with the base quantized to {text}"
    most: Certainty = "confirmed" if len(near) == 1 else "explained"
    yield BackwardGuess("base_quantized", says, BackwardChange(base=best), most=most)


def _tried_quantizations(given: QuantizedBase | None) -> Iterator[QuantizedBase]:
    """Yield the quantizations that are tried, the usual ones first.

    `given` is the quantization that the given base shows already, None for none. Its codes are
    those of the trainer then, and only the quantization of its scales and of its head is left to
    try.
    """
    if given is not None:
        yield replace(given, nested=True)
        yield replace(given, nested=True, parts="head")
        yield replace(given, parts="head")
        return
    blocks = sorted(BLOCK_SIZES, key=lambda size: (size != FIRST, size))
    for block in blocks:
        for encoding in ("NF4", "FP4"):
            for nested in (False, True):
                yield QuantizedBase(encoding, block, nested)
            if block == FIRST:
                yield QuantizedBase(encoding, block, True, "layers and head")


def _base_text(base: QuantizedBase) -> str:
    """Return a quantization in words: `NF4 in blocks of 64, of the head too, scales in float32`."""
    scales = "scales quantized too (double quantization)" if base.nested else "scales in float32"
    head = {"layers": "", "head": ", of the head alone", "layers and head": ", of the head too"}
    return f"{base.encoding} in blocks of {base.block}{head[base.parts]}, {scales}"


def distance_of_pass(
    case: BackwardCase,
    keys: Collection[str],
    change: BackwardChange | None,
    side: Literal["given", "computed"] = "given",
) -> float:
    """Return the L2 distance of the gradients of `keys` from those of another backward pass.

    They are the trainer's (`side` "given") or those of the right pass ("computed"). The other pass
    has `change`; None is the right one. A gradient that the pass does not give is zero.
    """
    made = None if change is None else case.recompute(change, None)
    total = 0.0
    for key in keys:
        pair = case.case(key)
        wanted = pair.computed
        if made is not None:
            wanted = made.gradient(key) if key in made.keys else np.zeros_like(wanted)
        held = pair.given if side == "given" else pair.computed
        total += float(np.square(held - wanted.reshape(held.shape)).sum())
    return float(np.sqrt(total))


HYPOTHESES = (
    BackwardHypothesis(("adapter_exchanged",), guess_factor_order, 316, "exact, nothing is fitted"),
    BackwardHypothesis(("adapter_merged",), guess_merged, 317, "nothing is fitted"),
    BackwardHypothesis(("lengths_in_graph",), guess_lengths, 315, "exact, nothing is fitted"),
    BackwardHypothesis(
        ("base_quantized",), guess_quantized_base, 330, "the nearest of some bases is taken"
    ),
)
