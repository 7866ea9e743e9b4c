"""Proposes which dumped array is which point: equal values first, then names, then near values.

The model's own pass on the same tokens gives the value of every point. Each array of a fitting size
is compared with each in every layout that is met in practice. An engine that computes something
else agrees up to its fault only; after it, arrays of one name pattern (`blk.{}.q`) are taken to be
the point that most of the pattern's arrays are. A name that says a point decides before values that
are near: in a residual stream each point is near its neighbour, and a fault in one branch makes the
neighbour the nearer one.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import AprfmtError
from aprfmt.inference.capture import find_key, key_name, parse_key
from aprfmt.inference.engines.captures import Captures
from aprfmt.inference.engines.layouts import CHAINS, PADDED, PointLayout, apply_layout
from aprfmt.inference.engines.mapping import MappedArray, NameMap
from aprfmt.inference.engines.modules import ModuleMap, hidden_state_points
from aprfmt.inference.engines.node_names import parse_node_name, points_of_node_name
from aprfmt.inference.engines.parts import ALIKE, finite_distance, has_vocabulary_axis, part_text
from aprfmt.inference.points import POINTS
from aprfmt.measure.log_softmax import POINT, is_log_softmax, shift_logits_onto

Numbers = NDArray[Any]
EQUAL, FAINT = 1e-3, 0.6  # relative distances: certain, possible; likely: see ALIKE
AS_NEAR = 1.05  # of two points nearer to each other than this neither is taken
FAR = 3.0  # values contradict a name where another point is nearer by this factor
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class PointFit:
    """An array read as a point: how far from the model's own value."""

    key: str
    layout: tuple[str, ...]
    rows: Any
    distance: float
    normalized: bool = False  # logits as log-probabilities
    empty: int = 0  # rows that are zeros, and not compared


def propose_mapping(
    captures: Captures,
    own: Mapping[str, Numbers],
    ids: Sequence[int],
    dtype: str = "float32",
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> NameMap:
    """Return a proposed mapping of dumped arrays to capture points, by values and names.

    `own` are the model's own values by key, in execution order, of a pass on the tokens `ids`.
    `aliases` is {key: key of the point of the model that has equal values}.
    """
    # Compare every array with every point, and read the names.
    fits = {name: _fits_of_array(captures, name, own, len(ids)) for name in captures.names}
    modules = ModuleMap(captures.names)
    layers = 1 + max((parse_key(key)[1] for key in own), default=-1)
    states = hidden_state_points(captures.names, layers)
    said = {
        name: [aliases.get(key, key) for key in _keys_by_name(name, modules, states)]
        for name in captures.names
    }
    names: dict[str, MappedArray | None] = dict.fromkeys(captures.names)
    taken: set[str] = set()
    best = sorted(_best_pairs(fits, captures.names, list(own)), key=lambda row: row[0].distance)

    def take(fit: PointFit, name: str) -> None:
        """Map the dumped array `name` to the capture point of `fit`.

        Does nothing if either is mapped already, or if the array repeats the values of a mapped
        point.
        """
        if names[name] is None and not _repeats_taken(fits[name], taken) and fit.key not in taken:
            names[name] = _mapped_array(fit)
            taken.add(fit.key)

    # Equal values are certain.
    for fit, name in best:
        if fit.distance <= EQUAL and _fits_its_name(fit, fits[name], said[name]):
            take(fit, name)
    # Then names: those of a pattern, then each alone.
    _take_by_pattern(names, fits, taken)
    _take_by_name(names, fits, taken, said)
    for fit, name in best:
        if fit.distance <= ALIKE:
            take(fit, name)
    # What is left gets the nearest free point, as possible, unless another one is as near.
    undecided: dict[str, str] = {}
    for name, row in names.items():
        if row is not None or _repeats_taken(fits[name], taken):
            continue  # or the same values once more, as the next layer's input
        rest = [fit for fit in fits[name] if fit.key not in taken and fit.distance <= FAINT]
        rest = rest or [fit for fit in fits[name] if fit.key in said[name] and fit.key not in taken]
        if rest:
            best_fit = min(rest, key=lambda fit: fit.distance)
            rivals = [fit for fit in rest if fit.distance <= AS_NEAR * best_fit.distance]
            if len(rivals) > 1 and not any(fit.key in said[name] for fit in rivals):
                undecided[name] = f"as near to {rivals[0].key} as to {rivals[1].key}"
                continue
            names[name] = replace(_mapped_array(best_fit), certainty="possible")
            taken.add(best_fit.key)
    _take_logprobs(names, fits, taken)
    reasons = {
        name: why
        for name, row in names.items()
        if row is None and (why := part_text(captures.read(name), own, said[name], len(ids)))
    }
    reasons |= {
        name: f"holds {captures.dtypes[name]}, no floats"
        for name, row in names.items()
        if row is None and said[name] and "int" in captures.dtypes[name]
    }
    return NameMap(names, captures.path.name, tuple(ids), dtype, undecided | reasons)


def _keys_by_name(
    name: str, modules: ModuleMap, states: Mapping[str, tuple[str, int]]
) -> list[str]:
    """Return the keys of the points that an array's name may mean; [] if none.

    The name may be a module's path, a llama.cpp node's name, one of our keys, or an entry of
    transformers' `hidden_states`, whose (point, layer) are in `states`.
    """
    if name in states:
        return [key_name(*states[name])]
    said = [key_name(found.point.name, found.layer) for found in modules.read(name)]
    node = parse_node_name(name)
    if node is not None:
        said += [key_name(point.name, node.layer) for point in points_of_node_name(name)]
    return said if find_key(name) is None else [*said, name]


def _fits_its_name(fit: PointFit, fits: Sequence[PointFit], said: Sequence[str]) -> bool:
    """Return whether the name of an array agrees with a fit, or values speak clearly for it.

    True if the fit's point is among `said`, the keys that the name says, if `said` is empty, or
    if every fit to a point of `said` is at least FAR times as distant. `fits` are all fits of the
    array.
    """
    named = [one.distance for one in fits if one.key in said]
    return fit.key in said or not named or fit.distance <= min(named) / FAR


def _repeats_taken(fits: Sequence[PointFit], taken: set[str]) -> bool:
    """Return whether an array has the values of a point that another array was mapped to."""
    return bool(fits) and fits[0].distance <= EQUAL and fits[0].key in taken


def _mapped_array(fit: PointFit) -> MappedArray:
    """Return a fit as an entry of the mapping, with its certainty."""
    sure = "certain" if fit.distance <= EQUAL else "likely"
    why = "the model's own values" if fit.distance <= EQUAL else "near the model's own values"
    why += ", as log-probabilities" if fit.normalized else ""
    why += f", but for {fit.empty} rows of zeros" if fit.empty else ""
    return MappedArray(fit.key, fit.layout, fit.rows, sure, float(f"{fit.distance:.3g}"), why)


def _fits_of_array(
    captures: Captures, name: str, own: Mapping[str, Numbers], tokens: int
) -> list[PointFit]:
    """Return how an array fits each point of its size by the best layout, nearest first.

    `own` are the model's values by key, `tokens` the number of tokens. [] if none has its size or
    it holds no numbers.
    """
    shape = captures.shapes[name]
    size = int(np.prod(shape, dtype=np.int64))
    found: list[PointFit] = []
    values: Numbers | None = None
    rows = captures.rows.get(name)
    # Only points of the array's size, or of its last row, can fit.
    for key, mine in own.items():
        if rows is not None and POINTS[parse_key(key)[0]].rows != "scores" and len(mine) == tokens:
            mine = mine[list(rows)]
        fitting = size in (mine.size, mine.size // max(tokens, 1)) or _has_padded_vocabulary(
            shape, key, mine
        )
        if not size or not fitting:
            continue
        if values is None:
            values = captures.read(name)
            if values.dtype.kind not in "fiu":
                return []
        if values.dtype.kind != "f" and mine.dtype.kind == "f":
            continue  # bits of floats, or ids: no value of this point
        best: PointFit | None = None
        for fit in _layout_fits(values, key, mine, tokens, name):
            if best is None or fit.distance < 0.9 * best.distance:
                best = fit
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda fit: fit.distance)


def _has_padded_vocabulary(shape: tuple[int, ...], key: str, mine: Numbers) -> bool:
    """Return whether an array has the rows of the logits `mine` and more columns than `mine`."""
    width = mine.shape[-1]
    if not has_vocabulary_axis(parse_key(key)[0]) or not shape or shape[-1] <= width:
        return False
    return int(np.prod(shape[:-1], dtype=np.int64)) in (1, len(mine))


def _layout_fits(
    values: Numbers, key: str, mine: Numbers, tokens: int, name: str
) -> Iterator[PointFit]:
    """Yield the fit of an array's values for each layout in which they have a point's size.

    `key` is the point, `mine` the model's value of it, `name` the array's name for messages.
    """
    axis = 1 if POINTS[parse_key(key)[0]].rows == "scores" else 0
    target = PointLayout(mine.shape, tokens)
    for chain in (PADDED,) if _has_padded_vocabulary(values.shape, key, mine) else CHAINS:
        try:
            read = apply_layout(values, chain, target, name)
        except AprfmtError:
            continue
        if read.size == mine.size:
            yield _fit_point(key, chain, "all", read.reshape(mine.shape), mine)
        elif axis == 0 and tokens > 1 and read.size == mine[-1].size:
            yield _fit_point(key, chain, "last", read.reshape(1, -1), mine[-1].reshape(1, -1))


def _fit_point(
    key: str, chain: tuple[str, ...], rows: Any, theirs: Numbers, mine: Numbers
) -> PointFit:
    """Return the fit of an array to a point, with the distance of its values.

    `chain` is the layout in which the array was read, `rows` "all" or "last". `theirs` are its
    values, `mine` the model's. Log-probabilities are compared with logits up to a constant for
    each row. Rows of zeros are left out where they are fewer than half.
    """
    zero: Numbers = np.asarray(~theirs.reshape(len(theirs), -1).any(axis=1))
    if 0 < 2 * zero.sum() < len(zero):
        fit = _fit_point(key, chain, rows, theirs[~zero], mine[~zero])
        return replace(fit, empty=int(zero.sum()))
    as_logs = key == POINT and is_log_softmax(theirs) and not is_log_softmax(mine)
    if as_logs:
        mine = shift_logits_onto(mine, theirs)
    return PointFit(key, chain, rows, finite_distance(theirs, mine), as_logs)


def _best_pairs(
    fits: Mapping[str, list[PointFit]], names: Sequence[str], keys: Sequence[str]
) -> Iterator[tuple[PointFit, str]]:
    """Yield every fit as (fit, array name), its distance raised by up to 1e-9 to break ties.

    Where several keys hold equal values, those in the order of the arrays have the smaller
    distance.
    """
    place = {key: i for i, key in enumerate(keys)}
    for at, name in enumerate(names):
        for fit in fits[name]:
            order = abs(at / max(len(names), 1) - place[fit.key] / max(len(keys), 1))
            yield replace(fit, distance=fit.distance + 1e-9 * order), name


def name_pattern(name: str) -> tuple[str, int] | None:
    """Return (name with {} for its first number, the number); None without a number."""
    found = _NUMBER.search(name)
    if found is None or len(found[0]) > 6:
        return None
    return f"{name[: found.start()]}{{}}{name[found.end() :]}", int(found[0])


def _take_by_pattern(
    names: dict[str, MappedArray | None], fits: Mapping[str, list[PointFit]], taken: set[str]
) -> None:
    """Map arrays whose names differ in a number only to one point, layer by layer.

    The point is the one that most of them are certain to be. `names` is the mapping so far, `fits`
    how each array fits the points, `taken` the mapped keys. Changes `names` and `taken`.
    """
    votes: dict[str, Counter[tuple[str, int]]] = {}
    for name, row in names.items():
        parts = name_pattern(name)
        if parts is not None and row is not None and row.certainty == "certain":
            point, layer = parse_key(row.key)
            if layer >= 0:
                votes.setdefault(parts[0], Counter())[point, layer - parts[1]] += 1
    for name, row in names.items():
        parts = name_pattern(name)
        if parts is None or parts[0] not in votes or (row and row.certainty == "certain"):
            continue
        (point, shift), _ = votes[parts[0]].most_common(1)[0]
        if parts[1] + shift >= 0:
            _take_if_best(
                names,
                fits,
                taken,
                name,
                key_name(point, parts[1] + shift),
                "likely",
                f"its name is like those of {point} in other layers",
            )


def _take_logprobs(
    names: dict[str, MappedArray | None], fits: Mapping[str, list[PointFit]], taken: set[str]
) -> None:
    """Map arrays of log-probabilities to the logits, whatever their distance.

    No other point has rows of probabilities that add to 1. `names` is the mapping so far, `fits`
    how each array fits the points, `taken` the mapped keys. Changes `names` and `taken`.
    """
    for name, row in names.items():
        if row is None:
            for fit in fits[name]:
                if fit.normalized and fit.key not in taken:
                    _take_if_best(
                        names,
                        fits,
                        taken,
                        name,
                        fit.key,
                        "likely",
                        "its rows are log-probabilities",
                    )
                    break


def _take_by_name(
    names: dict[str, MappedArray | None],
    fits: Mapping[str, list[PointFit]],
    taken: set[str],
    said: Mapping[str, Sequence[str]],
) -> None:
    """Map each array that has no point yet to the point its name says, unless values contradict it.

    Values contradict the name where its point is far off and another point is far nearer. `names`
    is the mapping so far, `fits` how each array fits the points, `taken` the keys of points that
    have an array, `said` the keys that each name may mean. Changes `names` and `taken`.
    """
    for name, row in names.items():
        if row is not None or _repeats_taken(fits[name], taken):
            continue
        for key in said[name]:
            fit = next((fit for fit in fits[name] if fit.key == key), None)
            if names[name] is not None or fit is None:
                continue
            if fit.distance > FAINT and fits[name][0].distance * FAR < fit.distance:
                continue
            certainty = "likely" if fit.distance <= ALIKE else "possible"
            _take_if_best(names, fits, taken, name, key, certainty, "its name says so")


def _take_if_best(
    names: dict[str, MappedArray | None],
    fits: Mapping[str, list[PointFit]],
    taken: set[str],
    name: str,
    key: str,
    certainty: str,
    why: str,
) -> None:
    """Map an array to a key it fits by size, if no array that fits better has it.

    `names` is the mapping so far, `fits` how each array fits the points, `taken` the mapped keys.
    `certainty` and `why` go into the entry. Changes `names` and `taken`.
    """
    fit = next((fit for fit in fits[name] if fit.key == key), None)
    row = names[name]
    if fit is None or (key in taken and (row is None or row.key != key)):
        return
    if row is not None:
        taken.discard(row.key)
    names[name] = replace(_mapped_array(fit), certainty=certainty, why=why)
    taken.add(key)
