"""Parts of a model that were never loaded: norms of 1, and matrices unrelated to the other side.

A *stack* of layers is those of the encoder, of the decoder, of a tower, or of a model that has only
one. A *part* is layers, or a stack and what belongs to it.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

The numbers of an initialisation need not be known. Norms of 1 and biases of 0 in one file alone,
where the other file's vary, say which model was not loaded. The biases of that model then look
dropped, and its matrices belong to nothing.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.drawn_numbers import FAR
from aprfmt.causes.tensor.foreign_values import correlation, same_values_reordered, sample_values
from aprfmt.causes.tensor.guess import JointHypothesis, groups_by_side
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import EQUAL, TensorDiff
from aprfmt.measure.row_reader import RowReader

WEAK = ("missing_bias", "stale_tensor", "tied_embedding", "derived")
LEAST = 1024  # values of a matrix that say whether it belongs to another one
LOOKED_AT = 1 << 18  # values of a tensor that are looked at
RELATED = 0.1  # two trainings have a lower correlation
FINE = 0.02  # rounding of an encoding up to which an initialisation shows
FEWEST = 16  # values of a vector that goes with the matrices of its layer
FEW = 2  # matrices of a layer that are unrelated at least
# A stored name: what is before the list of layers, and the number of the layer.
_NUMBERED = re.compile(r"(\w+(?:\.[a-zA-Z_]\w*)*)\.[a-zA-Z_]\w*\.(\d+)\.")
TOWERS = {"enc": "encoder", "dec": "decoder"}  # what begins their roles, and their names


@dataclass(frozen=True, slots=True)
class _Compared:
    """A model's tensor next to the other model's: one value everywhere, or a correlation.

    `constant` is the one value, `related` the correlation. `apart` says that the correlation is
    that of two independent draws of random numbers, `short` that the values are too few to show it
    alone.
    """

    constant: float | None = None
    related: float = 0.0
    apart: bool = False
    short: bool = False

    @property
    def unrelated(self) -> bool:
        """Whether the values are enough to show that they are unrelated to the other side's."""
        return self.apart and not self.short

    @property
    def unloaded(self) -> bool:
        """Whether it may belong to a part that was not loaded."""
        return self.apart or self.constant is not None


def _explain_side(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff], side: str
) -> dict[str, Finding]:
    """Return {tensor key: finding} of the layers that a side did not load; or {}.

    A layer counts that has a norm of 1, at least FEW unrelated matrices and no related one.
    Tensors outside of layers belong to it where all layers of their tower count.
    """
    keys = (
        key
        for key, row in rows.items()
        if row.verdict == "DIFFERENT"
        and not row.is_explained(WEAK)
        and pairs[key].a is not None
        and pairs[key].b is not None
    )
    compare = partial(_compare, side=side)
    seen = dict(find_in_pairs(context, pairs, keys, ("stale_tensor",), compare))
    layers = _unloaded_layers(rows, seen)
    every = {_stack_and_layer(key) for key in rows}
    whole = {
        tower
        for tower, _ in layers
        if {one for one in every if one[0] == tower and one[1] is not None} <= layers
    }
    # The roles of an encoder-decoder model without a stack are the decoder's.
    whole |= {""} if "decoder" in whole else set()
    found = {
        key: one
        for key, one in seen.items()
        if one.unloaded
        and (
            _stack_and_layer(key) in layers
            or (_stack_and_layer(key)[1] is None and _stack_and_layer(key)[0] in whole)
        )
    }
    told = [rows[key].explanation for key in found]
    if len({one and one.evidence[:1] for one in told}) == 1 and told[0] is not None:
        return {}  # one initialisation was found that gives them all
    if not found:
        return {}
    says = _sentence(side, rows, found, whole)
    made = {}
    for key, one in found.items():
        line = f"correlation {one.related:.2g}"
        if one.constant is not None:
            line = f"{one.constant:g} everywhere"
        stats = rows[key].stats
        apart = None if stats is None else stats.rel_l2
        finding = make_finding("stale_tensor", (key,), (says, line), apart, None, None)
        made[key] = replace(finding, side=side)
    return made


unloaded_groups = groups_by_side(_explain_side)


def _stack_and_layer(key: str) -> tuple[str, int | None]:
    """Return (name of the stack of layers that a tensor belongs to, number of its layer or None).

    The stack of an encoder-decoder model is "encoder" or "decoder", "" else. A stored name, which
    stands for a role that is not known, names the stack by what is before its last list of layers.
    """
    layer, role = split_key(key)
    if layer is None and (numbered := _NUMBERED.match(key)):
        return numbered[1], int(numbered[2])
    if layer is None and key.count(".") > 1 and not key.startswith("enc."):
        return key.rsplit(".", 2)[0], None
    tower = role.partition(".")[0]
    return TOWERS.get(tower, ""), layer


def _unloaded_layers(
    rows: Mapping[str, TensorDiff], seen: Mapping[str, _Compared]
) -> set[tuple[str, int | None]]:
    """Return the layers, as `_stack_and_layer` gives them, that one model did not load.

    No matrix of them is equal or related to the other side's, and a norm of theirs is 1.
    """
    norms = {_stack_and_layer(key) for key, one in seen.items() if one.constant == 1}
    loaded = {
        _stack_and_layer(key)
        for key, row in rows.items()
        if len(row.shape_b or ()) > 1
        and math.prod(row.shape_b or ()) >= LEAST
        and not (key in seen and seen[key].unloaded)
    }
    count: dict[tuple[str, int | None], int] = {}
    for key, one in seen.items():
        count[_stack_and_layer(key)] = count.get(_stack_and_layer(key), 0) + one.unrelated
    return {
        place for place in norms - loaded if place[1] is not None and count.get(place, 0) >= FEW
    }


def _compare(pair: TensorPair, side: str) -> _Compared | None:
    """Return how side "A" or "B" of a pair compares with the other; None where nothing can be said.

    A constant counts if it is what an initialisation gives: 1 to a norm, 0 to all else. The other
    side's tensor must vary.
    """
    assert pair.a is not None and pair.b is not None
    a, b = RowReader(pair.a), RowReader(pair.b)
    mine, other = (b, a) if side == "B" else (a, b)
    if mine.shape != other.shape or storage_noise(mine.encoding) > FINE:
        return None
    values, theirs = (sample_values(one, LOOKED_AT, 16) for one in (mine, other))
    if not (np.isfinite(values).all() and np.isfinite(theirs).all()) or np.ptp(theirs) == 0:
        return None
    if np.ptp(values) == 0:
        first = 1.0 if "norm" in pair.key and not pair.key.endswith(".bias") else 0.0
        same = float(values.flat[0]) == first and np.ptp(mine.whole) == 0
        return _Compared(first) if same else None
    if values.size < FEWEST:
        return None
    related = correlation(values, theirs)
    short = values.size < LEAST or len(mine.shape) < 2
    apart = abs(related) <= RELATED + FAR / values.size**0.5
    apart = apart and not same_values_reordered(mine, other, values, theirs)
    return _Compared(related=related, apart=apart, short=short)


def _sentence(
    side: str, rows: Mapping[str, TensorDiff], found: Mapping[str, _Compared], whole: set[str]
) -> str:
    """Return a sentence on the tensors that a side did not load, without their names."""
    stacks = {_stack_and_layer(key)[0] for key, one in found.items() if one.unrelated} - {""}
    known = bool(stacks) and stacks <= whole
    named = [f"the {one}" if one in TOWERS.values() else one for one in sorted(stacks)]
    part = f"{' and '.join(named)} of {side}" if known else side
    matrices = [one.related for one in found.values() if one.unrelated]
    constants = {one.constant for one in found.values()}
    biases = " and biases of 0" if 0.0 in constants else ""
    equal = sum(row.verdict in EQUAL for row in rows.values())
    away = "A" if side == "B" else "B"
    return (
        f"{part} was never loaded{'' if known else ' here'}: norms of 1{biases}, where {away}'s "
        f"vary, and {len(matrices)} matrices unrelated to {away}'s (correlation at most "
        f"{max(map(abs, matrices)):.2g}); {equal} other tensors are equal"
    )


HYPOTHESES = (
    JointHypothesis(
        ("stale_tensor",),
        unloaded_groups,
        391,
        "parts without known numbers of an initialisation, after those that have them",
        weak=WEAK,
    ),
)
