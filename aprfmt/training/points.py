"""A trainer's gradients of capture points, compared backward from the loss with those of a batch.

The first wrong one says which operation's backward is wrong: what comes after it
in the forward pass is right, and what comes before was made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.causes.training.step_case import COARSE
from aprfmt.inference.batch import Batch
from aprfmt.inference.capture import point_instances
from aprfmt.inference.gradients.given_points import GivenPoints
from aprfmt.inference.gradients.point_readers import PointReader, point_readers, suspects
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared
from aprfmt.training.gradient_verdict import judge_gradient
from aprfmt.training.reference_gradients import Computed
from aprfmt.training.report import PointStep

Array = NDArray[Any]
ZERO = 1e-13  # of the largest gradient's norm: what rounding in float64 leaves of zero
_FEW = 4  # tokens of the pass that shows which operations read a point
_SHOWN, _MOST = 3, 6  # points and operations that a sentence names


@dataclass(frozen=True)
class ComparedPoints:
    """The points whose gradients were compared, in backward order, and where a fault begins.

    `left` are the points that were not compared. `first` are the wrong points whose readers'
    gradients are all right; `says` is the sentence about them, "" where none is wrong. `scale` is
    the factor that all points carry and the gradients of parameters do not (a loss scale), 1.0 for
    none.
    """

    points: tuple[PointStep, ...]
    left: tuple[NotCompared, ...] = ()
    first: tuple[str, ...] = ()
    says: str = ""
    scale: float = 1.0


@dataclass
class _Pair:
    """The given and the computed gradient of a point, as matrices, and the rounding between them.

    `rounding` is the L2 distance that the trainer's arithmetic makes, None if it was not measured.
    """

    case: GradientCase
    rounding: float | None


def compare_points(
    model: Model,
    batch: Batch,
    given: GivenPoints,
    computed: Computed,
    *,
    trained_in: str | None = None,
    right_parameters: bool = False,
) -> ComparedPoints:
    """Return how the given gradients of points compare with the computed ones.

    `right_parameters` says that gradients of parameters were given and all agree. A common factor
    of all points then is a loss scale that was removed later, and no difference.
    """
    left = [NotCompared("point", name, "unreadable", why) for name, why in given.refused.items()]
    left += [NotCompared("array", name, "no counterpart", why) for name, why in given.left.items()]
    order = list(point_instances(model.spec.block, model.hyper, model.roles))[::-1]
    coarse = trained_in in ("bfloat16", "float16") or any(
        view.encoding in COARSE for view in model.roles.values()
    )
    pairs: dict[str, _Pair] = {}
    for key in order:
        if key not in given.values:
            continue
        exact = computed.exact.points.get(key)
        x = given.values[key]
        if exact is None or exact.size != x.size:
            why = "no gradient of it was computed here"
            if exact is not None:
                why = f"{list(x.shape)} numbers of the batch's tokens; expected {list(exact.shape)}"
            left.append(NotCompared("point", given.names[key], "unreadable", why))
            continue
        rounded = None if computed.rounded is None else computed.rounded.points.get(key)
        rounding = None if rounded is None else float(np.linalg.norm(rounded - exact))
        case = GradientCase(key, _matrix(x), _matrix(exact), coarse)
        pairs[key] = _Pair(case, rounding)
    largest = max((_size(each.case) for each in pairs.values()), default=0.0)
    scale = _loss_scale(pairs) if right_parameters else 1.0
    rows = []
    for key, pair in pairs.items():
        case = pair.case
        if scale != 1.0:
            case = GradientCase(key, case.given / scale, case.computed, case.coarse)
            pair.case = case
        if not np.isfinite(case.given).all():
            why = f"{int((~np.isfinite(case.given)).sum())} numbers are NaN or infinite"
            rows.append(PointStep(key, given.names[key], _size(case), None, "differs", why))
            continue
        found = judge_gradient(
            case,
            pair.rounding,
            stated=trained_in is not None,
            floor=ZERO * largest,
            flips=computed.flips,
        )
        factor = [guess.says for guess in found.guesses if guess.cause == "gradient_factor"]
        apart = None if not np.any(case.computed) and found.verdict == "agrees" else case.distance
        why = next(iter(factor), found.why)
        rows.append(PointStep(key, given.names[key], _size(case), apart, found.verdict, why))
    wrong = {row.key for row in rows if row.verdict == "differs"}
    left += [
        NotCompared("point", row.key, "unreadable", row.why)
        for row in rows
        if row.verdict == "not compared"
    ]
    if not wrong:
        return ComparedPoints(tuple(rows), tuple(left), scale=scale)
    few = next(ids[mask] for ids, mask in zip(_ids(batch), batch.mask, strict=True) if mask.any())
    readers = point_readers(model, [int(i) for i in few[:_FEW]])
    known = {row.key: row for row in rows if row.verdict != "not compared"}
    ways = {key: suspects(readers, key, known) for key in known if key in wrong}
    first = [key for key, way in ways.items() if not any(one.key in wrong for one in way)]
    # Points of one layer are parallel branches; another layer's come after them.
    layer = first[0].rpartition(".")[0]
    first = [key for key in first if key.rpartition(".")[0] == layer]
    says = _sentence([known[key] for key in first], [ways[key] for key in first], known)
    lacks = _missing_term(first[0], pairs)
    says += f"; it is the right one without that of {lacks}, which does not come back" * bool(lacks)
    return ComparedPoints(tuple(rows), tuple(left), tuple(first), says, scale)


def _ids(batch: Batch) -> Array:
    """Return the batch's token ids [samples, tokens]."""
    return batch.ids[:, : batch.row_length]


def _matrix(values: Array) -> Array:
    """Return a point's values as a float64 matrix with a row per token (for scores, per head)."""
    made: Array = values.astype(np.float64).reshape(len(values), -1)
    return made


def _size(case: GradientCase) -> float:
    """Return the norm of the computed gradient of a pair."""
    return float(np.linalg.norm(case.computed))


def _loss_scale(pairs: Mapping[str, _Pair]) -> float:
    """Return the factor between given and computed gradient of the first point from the loss.

    1.0 if that gradient is right, or is no multiple of the computed one.
    """
    pair = next(iter(pairs.values()), None)
    if pair is None or not np.isfinite(pair.case.given).all():
        return 1.0
    factor, _ = pair.case.factor
    if not np.isfinite(factor) or factor <= 0 or pair.case.right:
        return 1.0
    return factor if pair.case.near(pair.case.given, factor * pair.case.computed) else 1.0


def _missing_term(key: str, pairs: Mapping[str, _Pair]) -> str:
    """Return the point whose gradient is a term missing from that of `key`; "" if none is."""
    case = pairs[key].case
    for other, pair in pairs.items():
        if other == key or pair.case.computed.shape != case.computed.shape:
            continue
        if not pair.case.computed.any() or not np.isfinite(case.given).all():
            continue
        if case.near(case.given, case.computed - pair.case.computed):
            return other
    return ""


def _sentence(
    rows: Sequence[PointStep], ways: Sequence[Sequence[PointReader]], known: Mapping[str, PointStep]
) -> str:
    """Return a sentence that names the operation whose backward is wrong.

    `rows` are the first wrong points, `ways` the operations that read each of them. If several
    points are wrong, it is an operation that reads all of them, if there is one. `known` are all
    compared points by key.
    """
    says = ", ".join(f"{row.key}: {row.why}" for row in rows[:_SHOWN])
    right = list(dict.fromkeys(one.key for way in ways for one in way if one.key in known))
    if right:
        says += f"; right after {'it' if len(rows) == 1 else 'them'}: {', '.join(right[:_SHOWN])}"
    named = [
        {word: one.key for one in way for word in one.operations} for way in ways
    ]  # operation -> the point that it makes
    common = [word for word in named[0] if all(word in each for each in named)]
    operations = common or list(dict.fromkeys(word for each in named for word in each))
    places = {word: key for each in reversed(named) for word, key in each.items()}
    words = [f"{word} ({places[word]})" for word in operations]
    if not right:
        words.append("the loss itself")
    if len(words) == 1:
        return f"{says}; wrong is the backward of {words[0]}"
    more = f" or {len(words) - _MOST} more" if len(words) > _MOST else ""
    return f"{says}; wrong is the backward of one of: {', '.join(words[:_MOST])}{more}"
