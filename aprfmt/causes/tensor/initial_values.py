"""Weights that were never trained: one side has the numbers that an initialisation drew.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A layer, a head or a model whose weights were never loaded has matrices of drawn numbers, biases of
0 and norms of 1. All of that is one cause, though the biases by themselves look dropped, and the
matrices look like another model's.

Sources for what an initialisation gives: transformers' `_init_weights` (normal numbers of deviation
`initializer_range`, biases 0, norms 1), `torch.nn.Linear.reset_parameters` (even numbers up to
1/sqrt(inputs), the bias too), `torch.nn.init` (Xavier, Kaiming), GPT-2's division by sqrt(2 *
layers).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.tensor.context import PairContext, find_in_pairs
from aprfmt.causes.tensor.drawn_numbers import FAR, KURTOSIS, Drawn, drawn_from, is_even_throughout
from aprfmt.causes.tensor.foreign_values import correlation, same_values_reordered, sample_values
from aprfmt.causes.tensor.guess import JointHypothesis, groups_by_side
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.causes.tensor.token_tables import common_rows
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import storage_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import EQUAL, TensorDiff
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

LEAST = 1024  # values from which a distribution speaks for itself
FEWEST = 64  # values below which even a known deviation says nothing
LOOKED_AT = 1 << 18  # values of a tensor that are looked at
ROWS = 16  # rows that are looked at, at least
RELATED = 0.1  # two trainings have a lower correlation
FINE = 0.02  # rounding of an encoding up to which a distribution shows
USUAL_RANGE = 0.02  # initializer_range of nearly every configuration
MOST_OTHERS = 0.5  # share of the other tensors that are equal where a short vector is called drawn
WEAK = ("stale_tensor", "missing_bias", "tied_embedding", "derived")
COMPARED = 4  # equal matrices that are asked whether the whole model was never trained
_KERNELS = 4  # axes of a convolution's kernels over two dimensions; a stack of matrices has three
SHOWN = 3  # kinds of numbers that a sentence lists


@dataclass(frozen=True, slots=True)
class Initialiser:
    """A known initialisation: its name, and the size of the numbers that it draws."""

    size: float
    name: str


@dataclass(frozen=True, slots=True)
class InitialNumbers:
    """What an initialisation gave one side of a tensor: drawn numbers, or one `constant`.

    `usual` is the known initialisation that gives these numbers, and None for none.
    """

    key: str
    side: str
    drawn: Drawn | None
    constant: float | None
    usual: "Initialiser | None"
    line: str


def _explain_side(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff], side: str
) -> dict[str, Finding]:
    """Return {tensor key: finding} of tensors that side `side` never trained; {} without any.

    They differ, and hold the numbers of an initialisation. {} too if the other side's numbers look
    drawn as well in most tensors.
    """
    seen: dict[str, InitialNumbers] = {}
    short: dict[str, InitialNumbers] = {}
    both: list[bool] = []
    keys = (
        key
        for key, row in rows.items()
        if _is_open(row) and pairs[key].a is not None and pairs[key].b is not None
    )

    def find(pair: TensorPair) -> InitialNumbers | None:
        """Return the numbers of an initialisation that the side holds of a pair; None if none."""
        return _find_initial_numbers(context, pair, pair.key, side, both)

    for key, one in find_in_pairs(context, pairs, keys, ("stale_tensor",), find):
        (seen if one.drawn and _element_count(rows[key]) >= LEAST else short)[key] = one
    # Where both sides of most tensors, or equal matrices, are drawn, no training is missing here.
    if len(both) >= COMPARED and sum(both) * 2 > len(both):
        return {}
    if (side == "A" or not all(one.usual for one in seen.values())) and _are_untrained(pairs, rows):
        seen = {key: one for key, one in seen.items() if side == "B" and one.usual}
    # Constants and short vectors show it with a matrix of theirs, or where all else is equal.
    others = [row for key, row in rows.items() if key not in seen and key not in short]
    equal = sum(row.verdict in EQUAL or row.verdict == "WITHIN" for row in others)
    alone = equal >= MOST_OTHERS * len(rows)
    places = {split_key(key)[0] for key in seen}
    layers = {split_key(key)[0] for key in rows} - {None}
    whole = len(places - {None}) > len(layers) / 2
    joined = {
        key: one
        for key, one in short.items()
        if split_key(key)[0] in places
        or (split_key(key)[0] is None and whole)
        or (alone and one.drawn is not None and one.usual)
    }
    found = seen | joined
    says = _sentence(side, list(found.values()))
    kinds = {(one.drawn.kind, one.usual) for one in found.values() if one.drawn is not None}
    made: dict[str, Finding] = {}
    for key, one in found.items():
        # The sentence says how the numbers are drawn; a line does too where that differs.
        how = f"{one.drawn.text()}, " if one.drawn is not None and len(kinds) > 1 else ""
        told = (says, f"{how}{one.line}")
        finding = make_finding("stale_tensor", (key,), told, _distance(rows[key]), None, None)
        made[key] = replace(finding, side=side)
    return made


initial_groups = groups_by_side(_explain_side)


def _is_open(row: TensorDiff) -> bool:
    """Return whether a tensor differs and nothing but a cause of WEAK explains it."""
    return row.verdict in ("DIFFERENT", "SHAPE_DIFFERS") and not row.is_explained(WEAK)


def _are_untrained(pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]) -> bool:
    """Return whether the matrices that are equal on both sides are untrained, too."""
    drawn = []
    for key, row in rows.items():
        side = pairs[key].b
        if row.verdict not in EQUAL or side is None or len(side.shape) < 2:
            continue
        reader = RowReader(side)
        if reader.size < LEAST or storage_noise(reader.encoding) > FINE:
            continue
        try:
            values = sample_values(reader, LOOKED_AT, ROWS)
            drawn.append(bool(np.isfinite(values).all()) and _drawn_throughout(values, reader))
        except AprfmtError:
            continue
        finally:
            pairs[key].drop()
        if len(drawn) == COMPARED:
            break
    return sum(map(bool, drawn)) * 2 > len(drawn)


def _element_count(row: TensorDiff) -> int:
    """Return the number of values of B's tensor."""
    return math.prod(row.shape_b or ())


def _distance(row: TensorDiff) -> float | None:
    """Return the relative distance of a tensor's sides; None where it was not measured."""
    return None if row.stats is None else row.stats.rel_l2


def _find_initial_numbers(
    context: PairContext, pair: TensorPair, key: str, label: str, both: list[bool]
) -> InitialNumbers | None:
    """Return what initialisation the tensor of side `label` still has; None if it was trained.

    Appends to `both` whether the other side's numbers look drawn at random as well.
    """
    assert pair.a is not None and pair.b is not None
    sides = (pair.b, pair.a) if label == "B" else (pair.a, pair.b)
    mine, other = RowReader(sides[0]), RowReader(sides[1])
    if mine.shape != other.shape:
        common = common_rows(key, mine, other)
        if common is None:
            return None
        mine, other = common
    if mine.size < 2 or mine.side.stored[0].parts.keys() - {""}:
        return None
    values, theirs = (sample_values(side, LOOKED_AT, ROWS) for side in (mine, other))
    if not (np.isfinite(values).all() and np.isfinite(theirs).all()):
        return None
    if np.ptp(values) == 0:
        value = float(values.flat[0])
        first = 0.0 if key.endswith(".bias") else 1.0 if "norm" in key else None
        if value != first or np.ptp(theirs) == 0 or np.ptp(mine.whole) != 0:
            return None
        return InitialNumbers(key, label, None, value, None, f"{value:g} everywhere")
    if np.ptp(theirs) == 0 or values.size < FEWEST or storage_noise(mine.encoding) > FINE:
        return None
    drawn = _drawn_throughout(values, mine)
    if drawn is None:
        return None
    usual = usual_initialiser(context, label, key, mine.shape, drawn)
    if not usual:
        return None  # many a trained matrix has such numbers: only those of a known one tell
    trained = _drawn_throughout(theirs, other)
    both.append(trained is not None)
    if trained is not None and (
        not usual
        or usual_initialiser(context, "A" if label == "B" else "B", key, other.shape, trained)
    ):
        return None  # nothing tells which of the two was drawn
    related = correlation(values, theirs)
    if abs(related) > RELATED + FAR / values.size**0.5:
        return None
    if same_values_reordered(mine, other, values, theirs):
        return None
    away = "A" if label == "B" else "B"
    line = (
        f"mean {drawn.mean:.2g} over {values.size} values; {away}'s: mean "
        f"{float(theirs.mean()):.2g}, deviation {float(theirs.std()):.3g}; correlation "
        f"{related:.2g}"
    )
    return InitialNumbers(key, label, drawn, None, usual, line)


def _drawn_throughout(values: "Array", reader: RowReader) -> Drawn | None:
    """Return the distribution of all rows and columns of a tensor's values; None if there is none.

    Short vectors are judged by their distribution alone.
    """
    drawn = drawn_from(values, storage_noise(reader.encoding))
    if drawn is None or (values.size >= LEAST and not is_even_throughout(values, drawn)):
        return None
    return drawn


def usual_initialiser(
    context: PairContext, label: str, key: str, shape: Sequence[int], drawn: Drawn
) -> Initialiser | None:
    """Return the initialisation that draws numbers of this distribution for a tensor, or None.

    `label` is the side ("A" or "B"); where it has no configuration the other's is used. `shape`
    is [outputs, inputs] of a matrix.
    """
    size = drawn.size
    count = min(math.prod(shape), LOOKED_AT)
    # The standard error of a deviation, and what rounding to 16 bits may add.
    near = FAR * ((KURTOSIS[drawn.kind][0] - 1) / 4 / count) ** 0.5 + 0.002
    known = _known_initialisers(context, label, key, shape, drawn.kind)
    fits = [one for one in known if one.size > 0 and abs(size / one.size - 1) <= near]
    return min(fits, key=lambda one: abs(size / one.size - 1), default=None)


def _known_initialisers(
    context: PairContext, label: str, key: str, shape: Sequence[int], kind: str
) -> Iterator[Initialiser]:
    """Yield the known initialisations of a tensor whose numbers have the distribution `kind`."""
    model = context.models[label.lower()]
    config = model.config or context.models["b" if label == "A" else "a"].config or {}
    inputs, outputs = _fans(context, label, key, shape)
    both = inputs + outputs
    if kind == "uniform":
        if inputs:
            yield Initialiser(inputs**-0.5, f"1/sqrt({inputs}), as torch.nn.Linear")
            yield Initialiser((6 / inputs) ** 0.5, f"as Kaiming's of {inputs} inputs")
        if outputs:
            yield Initialiser((6 / both) ** 0.5, f"as Xavier's of {inputs} and {outputs}")
        return
    stated = config.get("initializer_range")
    given = float(stated) if isinstance(stated, (int, float)) else USUAL_RANGE
    name = "initializer_range" if stated else "transformers' usual initializer_range"
    yield Initialiser(given, f"the {name}" if stated else name)
    layers = next((int(str(one["n_layers"])) for one in context.hyper if one.get("n_layers")), 0)
    if layers:
        yield Initialiser(given / (2 * layers) ** 0.5, f"{name} / sqrt(2 * {layers} layers)")
    if kind == "normal" and inputs:
        yield Initialiser((2 / inputs) ** 0.5, f"as Kaiming's of {inputs} inputs")
        yield Initialiser(inputs**-0.5, f"as LeCun's of {inputs} inputs")
    if kind == "normal" and outputs:
        yield Initialiser((2 / both) ** 0.5, f"as Xavier's of {inputs} and {outputs}")
    if key == "token_embd.weight":
        yield Initialiser(1.0, "as torch.nn.Embedding")


def _fans(context: PairContext, label: str, key: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return (inputs, outputs) of a matrix, or of the matrix whose bias this is; 0 where unknown.

    The kernels [out, in, ..., height, width] of a convolution count as torch.nn.init counts them.
    """
    if len(shape) >= _KERNELS:
        return math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    if len(shape) > 1:
        return int(shape[-1]), int(shape[-2])
    weight = context.sides(label.lower()).get(f"{key.removesuffix('.bias')}.weight")
    if not key.endswith(".bias") or weight is None or len(weight.shape) < 2:
        return 0, 0
    return int(weight.shape[-1]), 0


def _sentence(side: str, found: Sequence[InitialNumbers]) -> str:
    """Return a sentence on what all these tensors of a side contain, without their names."""
    kinds: dict[str, int] = {}
    for one in found:
        if one.drawn is not None:
            text = one.drawn.text(one.usual.size if one.usual else None)
            text += f" ({one.usual.name})" if one.usual else ""
            kinds[text] = kinds.get(text, 0) + 1
    shown = sorted(kinds, key=lambda text: -kinds[text])
    told = [
        f"{text} in {kinds[text]} tensor{'s' * (kinds[text] > 1)}" if len(kinds) > 1 else text
        for text in shown[:SHOWN]
    ]
    if len(shown) > SHOWN:
        told.append(f"others in {sum(kinds[text] for text in shown[SHOWN:])}")
    biases = any(one.key.endswith(".bias") and one.drawn for one in found)
    scales = any("norm" in one.key and not one.key.endswith(".bias") and one.drawn for one in found)
    constants = {one.constant for one in found if one.constant is not None}
    told += ["biases of 0"] * (0.0 in constants) + ["norms of 1"] * (1.0 in constants)
    given = [*["0 to a bias"] * biases, *["1 to a norm"] * scales]
    more = f"; transformers' own gives {' and '.join(given)}" if given else ""
    return (
        f"{side} was never trained or loaded here, it holds fresh numbers of an initialisation: "
        f"{', '.join(told)}{more}"
    )


HYPOTHESES = (
    JointHypothesis(
        ("stale_tensor",),
        initial_groups,
        390,
        "matrices, biases and norms that one initialisation made, before each is a cause",
        weak=WEAK,
        tables=True,
    ),
)
