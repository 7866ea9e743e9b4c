"""Parts of packed weights that stand under the names of other packed weights.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. Its *suffix*
is its name after the weight's. A *place* is the name of one part of one weight. A and B are the two
files that are compared; a *side* is one of them, or its tensor.

A tool that writes the parts of fused or stacked weights again, or renames them, may put one part
under another weight: scales of gate under up, codes of another layer, scales of another expert.
Every part is sound by itself then. Where both files pack a weight alike, the bytes say whose a part
is. Else the parts of the side's other wrong weights are put in its place one after another, and
decoded.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encodings import find_encoding
from aprfmt.base.sequences import first_and_more
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import JointHypothesis, groups_by_side
from aprfmt.causes.tensor.lattices import find_scheme
from aprfmt.causes.tensor.packed_copies import PackedCopy, packed_copies
from aprfmt.causes.tensor.packed_parts import INDICES, confirm_reading
from aprfmt.causes.tensor.proof import make_finding, prove_bytes
from aprfmt.codecs import decode
from aprfmt.codecs.dialect import OF_INPUTS
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.tensors.runs import are_same_tensor

if TYPE_CHECKING:
    from aprfmt.base.protocols import LazyTensor
    from aprfmt.codecs.base import Array, Bytes
    from aprfmt.codecs.lattice import PackedWeight
    from aprfmt.tensors.view import View

CAUSE_ROWS = (
    Cause(
        "exchanged_parts", "tensor", "bug",
        "Parts of packed weights stand under the names of other weights: scales of gate under up, "
        "codes of another layer, zero points of another expert.",
        "Two or more packed weights of one shape are wrong, and the bytes of their parts are not.",
        "Each part put back with its own weight gives the other side's values.",
        weights="exchanged",
    ),
)  # fmt: skip

# What the values of such a weight look like if each is looked at alone.
WEAK = (
    "quant_scale", "quant_min", "nested_offset", "zero_point", "packing_order", "group_index",
    "clipped_codes", "scale", "stale_tensor", "wrong_rows", "row_offset", "value_order",
    "expert_order", "swapped_tensors", "copied_tensor", "layer_order",
    "coarse_grid",
)  # fmt: skip
# Those of them that speak of parts beside the codes.
OF_PARTS = ("quant_scale", "quant_min", "zero_point", "scale")
HEAD = 4096  # bytes that are compared before all of a part
FIRST = 64  # rows that are decoded before all of a weight
FEW = 16  # numbers of a part from which one alone says whose it is
TRIED = 12  # other weights whose parts are tried in one weight
FAILED = 3  # weights without a result, after which no other is asked
MOST_TRIED = 1024  # pairs of stacked weights that are tried
NEARER = 0.8  # of the distance at most is left with the right part
SHOWN = 2  # moved parts that a sentence names


class Place(NamedTuple):
    """Where a part stands: the tensor's key, the number of the stored weight in it, the suffix."""

    key: str
    number: int
    suffix: str


class MovedParts(NamedTuple):
    """The parts of one tensor that are another weight's: {place: the place they belong to}.

    `kept` are the suffixes that stand where they belong. `copied`: the place they belong to has
    them, too. `found` is the finding of the values, None where the bytes are the proof.
    """

    moved: Mapping[Place, Place]
    kept: tuple[str, ...]
    copied: bool
    found: Finding | None


class PartIndex:
    """The parts of all packed weights of one side, found by their bytes."""

    def __init__(self, sides: "Mapping[str, View]") -> None:
        """Take the tensors of a side by their keys; no byte is read."""
        self._parts: dict[Place, LazyTensor] = {}
        self._alike: dict[tuple[str, str, tuple[int, ...]], list[Place]] = defaultdict(list)
        for key, view in sides.items():
            for number, one in enumerate(view.stored):
                for suffix, part in one.parts.items():
                    place = Place(key, number, suffix)
                    self._parts[place] = part
                    self._alike[suffix, part.info.encoding, part.info.shape].append(place)

    def part(self, place: Place) -> "LazyTensor | None":
        """Return the part that stands at a place; None for a place of no packed weight."""
        return self._parts.get(place)

    def places_of(self, part: "LazyTensor", suffix: str) -> list[Place]:
        """Return the places of all parts with this suffix and these bytes."""
        info = part.info
        head = bytes(part.raw(0, min(HEAD, info.nbytes)))
        return [
            place
            for place in self._alike[suffix, info.encoding, info.shape]
            if bytes(self._parts[place].raw(0, len(head))) == head
            and are_same_tensor(self._parts[place], part)
        ]


def _explain_side(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff], side: str
) -> dict[str, Finding]:
    """Return {tensor key: finding} of the packed weights of a side that have others' parts."""
    label, there = side.lower(), "a" if side == "B" else "b"
    mine, theirs = context.sides(label), context.sides(there)
    wrong = [
        key
        for key, row in rows.items()
        if row.is_unexplained(WEAK) and key in mine and any(one.parts for one in mine[key].stored)
    ]
    if not wrong:
        return {}
    here, away = PartIndex(mine), PartIndex(theirs)
    found: dict[str, MovedParts] = {}
    search = _DonorSearch(context, label, wrong)
    for key in wrong:
        if _are_packed_alike(mine[key], theirs[key]):
            made = _moved_by_bytes(key, mine[key], here, away) if side == "B" else None
        else:
            made = search.moved_parts(key) or _copied_in_place(key, mine[key], rows[key], here)
        if made is not None:
            found[key] = made
    found = _without_doubtful(found, here)
    findings = {}
    for key, one in found.items():
        says = (_sentence(side, one), _place_sentence(one, here))
        findings[key] = _make_finding(key, one, says, rows[key], here, side)
    return findings


def _are_packed_alike(x: "View", y: "View") -> bool:
    """Return whether two tensors are packed weights with the same parts."""
    return (
        x.encoding == y.encoding
        and len(x.stored) == len(y.stored)
        and all(
            one.parts.keys() == two.parts.keys()
            for one, two in zip(x.stored, y.stored, strict=True)
        )
    )


def _moved_by_bytes(key: str, view: "View", here: PartIndex, away: PartIndex) -> MovedParts | None:
    """Return which parts of B's weight are, byte for byte, those of another weight of A.

    None if a part is no weight's, if all are one other weight's (whole weights are exchanged), or
    none moved.
    """
    moved: dict[Place, Place] = {}
    kept: set[str] = set()
    for number, one in enumerate(view.stored):
        sources: dict[str, list[Place]] = {}
        for suffix, part in one.parts.items():
            place = Place(key, number, suffix)
            right = away.part(place)
            if right is None or OF_INPUTS.search(suffix):
                continue
            if are_same_tensor(right, part):
                kept.add(suffix)
                continue
            sources[suffix] = away.places_of(part, suffix)
            if not sources[suffix] or _is_constant(part):
                return None
        if not sources:
            continue
        # Of several weights with these bytes, one that has all moved parts.
        homes = [{(p.key, p.number) for p in places} for places in sources.values()]
        home = min(set.intersection(*homes), default=None)
        if home is None or _is_whole(one, Place(*home, ""), away):
            return None
        moved |= {Place(key, number, suffix): Place(*home, suffix) for suffix in sources}
    if not moved:
        return None
    names = {place.suffix for place in moved}
    copied = all(
        (there := here.part(source)) is not None
        and (own := here.part(place)) is not None
        and are_same_tensor(there, own)
        for place, source in moved.items()
    )
    return MovedParts(moved, tuple(sorted(kept - names)), copied, None)


def _is_whole(one: "LazyTensor", home: Place, away: PartIndex) -> bool:
    """Return whether all parts of a weight are those of one weight of the other side."""
    return all(
        (held := away.part(home._replace(suffix=suffix))) is not None
        and are_same_tensor(held, part)
        for suffix, part in one.parts.items()
        if not OF_INPUTS.search(suffix)
    )


def _is_constant(part: "LazyTensor") -> bool:
    """Return whether all bytes of a part are equal, so that they say nothing about whose it is."""
    raw = np.frombuffer(part.raw(), np.uint8)
    return not raw.size or bool((raw == raw[0]).all())


def _copied_in_place(key: str, view: "View", row: TensorDiff, here: PartIndex) -> MovedParts | None:
    """Return which parts beside the codes are copies of another weight's of the same side.

    That the values show wrong parts is what explains the tensor as yet: it has to name some of
    OF_PARTS. Parts that many weights share, as zero points in the middle, are no copies.
    """
    found = row.explanation
    if found is None or found.cause not in OF_PARTS or len(view.stored) != 1:
        return None
    moved: dict[Place, Place] = {}
    for suffix, part in view.stored[0].parts.items():
        place = Place(key, 0, suffix)
        if not suffix or OF_INPUTS.search(suffix) or _numbers(here, place) < FEW:
            continue
        if suffix in INDICES:
            continue  # groups in order are the same in all weights of a shape
        others = [one for one in here.places_of(part, suffix) if one.key != key]
        if len(others) == 1 and not _is_constant(part):
            moved[place] = others[0]
    if len({(place.key, place.number) for place in moved.values()}) != 1:
        return None
    return MovedParts(moved, (), True, found)


class _DonorSearch:
    """Looks for the part that belongs to a weight among those of the side's other wrong weights."""

    def __init__(self, context: PairContext, label: str, wrong: Sequence[str]) -> None:
        """Store the side's label, "a" or "b", and the keys of its wrong weights."""
        self._context, self._label, self._wrong = context, label, wrong
        self._failed = 0
        self._related: list[tuple[int, str]] = []  # (layers on, role there) that held

    def moved_parts(self, key: str) -> MovedParts | None:
        """Return the parts that the weight `key` has to have from others; None if none fit."""
        if self._failed >= FAILED:
            return None
        a, b = (self._context.reader(label, key) for label in "ab")
        if a is None or b is None or a.shape != b.shape:
            return None
        case = DifferingPair(key, a, b, self._context)
        case.known = False
        for copy in packed_copies(case):
            if copy.whose[0].lower() != self._label:
                continue
            made = self._moved_in_copy(key, copy)
            self._failed += made is None
            return made
        return None

    def _moved_in_copy(self, key: str, copy: PackedCopy) -> MovedParts | None:
        """Return the parts that a copy has to have from other weights; None if none fit."""
        stored = copy.reader.side.stored
        if len(stored) > 1:
            return _moved_in_stack(key, copy)
        views = self._context.sides(self._label)
        for other in self._donors(key):
            donor = views[other].stored
            for suffixes in _sets_of_parts(stored[0], donor[0]) if len(donor) == 1 else ():
                if not _is_nearer(copy, stored[0], donor[0], suffixes):
                    continue
                found = _confirm(copy, [_changed(stored[0], donor[0], suffixes)])
                if found is not None:
                    (layer, _), (there, role) = split_key(key), split_key(other)
                    self._related.append(((there or 0) - (layer or 0), role))
                    moved = {Place(key, 0, name): Place(other, 0, name) for name in suffixes}
                    left = tuple(sorted(set(stored[0].parts) - set(suffixes)))
                    return MovedParts(moved, left, False, found)
        return None

    def _donors(self, key: str) -> list[str]:
        """Return the wrong weights whose parts are tried in `key`, the likeliest first."""
        layer, role = split_key(key)

        def rank(other: str) -> tuple[bool, bool, bool, int]:
            """Return a sort key: as in earlier finds, in the layer, of the role, near."""
            there, name = split_key(other)
            away = (there or 0) - (layer or 0)
            return (away, name) not in self._related, there != layer, name != role, abs(away)

        return sorted((one for one in self._wrong if one != key), key=rank)[:TRIED]


def _sets_of_parts(one: "LazyTensor", other: "LazyTensor") -> Iterator[tuple[str, ...]]:
    """Yield the suffixes of parts that may have moved together from another weight.

    These are all but the codes, the codes, each of the others alone, and all but one of them.
    """
    if one.info.encoding != other.info.encoding or one.parts.keys() != other.parts.keys():
        return
    apart = [
        suffix
        for suffix, part in one.parts.items()
        if not OF_INPUTS.search(suffix) and not are_same_tensor(part, other.parts[suffix])
    ]
    for suffix in apart:
        mine, there = one.parts[suffix].info, other.parts[suffix].info
        if (mine.encoding, mine.shape) != (there.encoding, there.shape):
            return
    beside = tuple(suffix for suffix in apart if suffix)
    if not beside or len(beside) == len(apart):
        return  # nothing but codes, or equal codes: no exchange changes anything
    yield beside
    yield ("",)
    if len(beside) > 1:
        yield from ((suffix,) for suffix in beside)
    if len(beside) > 2:
        yield from (tuple(s for s in beside if s != suffix) for suffix in beside)


class _Changed(NamedTuple):
    """A weight with parts of another one: in its dialect, or its parts for a codec."""

    packed: "PackedWeight | None"
    parts: "Mapping[str, Bytes]"
    encoding: str
    shape: tuple[int, ...]

    def decode(self) -> "Array":
        """Return the values as float32. Raises CodecError where parts do not fit."""
        if self.packed is not None:
            return self.packed.decode()
        return decode(self.encoding, self.parts, self.shape)


def _changed(
    one: "LazyTensor", other: "LazyTensor | None" = None, suffixes: Collection[str] = ()
) -> _Changed:
    """Return a weight with the parts `suffixes` of another one, or as it is stored."""
    names = () if other is None else suffixes
    if one.packed is None:
        parts = {s: (other if s in names and other else one).parts[s].raw() for s in one.parts}
        return _Changed(None, parts, one.info.encoding, one.info.shape)
    weight: PackedWeight = one.packed()
    if other is not None and other.packed is not None:
        theirs = other.packed().parts
        main = weight.dialect.main
        weight = weight.replace_parts({s or main: theirs[s or main] for s in names})
    return _Changed(weight, {}, one.info.encoding, one.info.shape)


def _confirm(copy: PackedCopy, made: "Sequence[_Changed]") -> Finding | None:
    """Return the finding that a copy is right with these weights in place of its own, or None."""
    says = "parts are others'"
    weights = [one.packed for one in made if one.packed is not None]
    if len(weights) == len(made):
        return confirm_reading(copy, "exchanged_parts", says, weights)
    view = copy.reader.side
    try:
        values = view.undo_layout([one.decode().reshape(one.shape) for one in made])
    except AprfmtError:
        return None
    y = np.asarray(values, np.float64).reshape(-1, copy.y.shape[-1])
    y = y if copy.rows is None else y[copy.rows]
    # What bitsandbytes decodes is rounded to the type of its quant state: to BF16 at worst.
    stored = "BF16" if find_encoding(made[0].encoding).claim else "F32"
    scheme = find_scheme(y, stored, tuple(copy.case.context.schemes.found), True)
    if scheme is None:
        return None
    return copy.explain_repaired("exchanged_parts", (says,), y, scheme.lattice)


def _is_nearer(
    copy: PackedCopy, one: "LazyTensor", other: "LazyTensor", suffixes: Collection[str]
) -> bool:
    """Return whether the first rows of a changed weight are nearer to the source than as stored.

    True where only all of it can be asked: its rows stand elsewhere in the tensor, or follow
    from a codec.
    """
    now, changed = _changed(one).packed, _changed(one, other, suffixes).packed
    if copy.reader.side.steps or copy.rows is not None or now is None or changed is None:
        return True
    try:
        old, new = now.laid_out(), changed.laid_out()
        if old is None or new is None:
            return False
        count = min(FIRST, old.rows, len(copy.x))
        x = copy.x[:count]
        with np.errstate(all="ignore"):
            before, after = (
                rel_l2(np.asarray(laid.decode(0, count), np.float64).reshape(x.shape), x)
                for laid in (old, new)
            )
    except AprfmtError:
        return False
    return bool(after <= NEARER * before)


def _moved_in_stack(key: str, copy: PackedCopy) -> MovedParts | None:
    """Return which stored weights of a stack have the parts of others of it; None if none have.

    Each must be one matrix of the stack, in its order, as experts are.
    """
    stored = copy.reader.side.stored
    count = len(stored)
    if copy.rows is not None or copy.x.size % count:
        return None
    values = [np.asarray(_changed(one).decode(), np.float64) for one in stored]
    if len({one.size for one in values}) > 1:
        return None
    if not np.array_equal(np.stack(values).reshape(copy.y.shape), copy.y):
        return None
    x = copy.x.reshape(count, *values[0].shape)
    off = np.array([rel_l2(y, wanted) for y, wanted in zip(values, x, strict=True)])
    bad = np.flatnonzero(off > 2 * np.median(off)).tolist() or list(range(count))
    if len(bad) ** 2 > MOST_TRIED:
        return None
    made = [_changed(one) for one in stored]
    moved: dict[Place, Place] = {}
    for at in bad:
        least = NEARER * off[at]
        home: tuple[int, tuple[str, ...]] | None = None
        for other in (one for one in bad if one != at):
            for suffixes in _sets_of_parts(stored[at], stored[other]):
                changed = _changed(stored[at], stored[other], suffixes)
                away = rel_l2(np.asarray(changed.decode(), np.float64), x[at])
                if away < least:
                    least, home, made[at] = away, (other, suffixes), changed
        if home is not None:
            moved |= {Place(key, at, name): Place(key, home[0], name) for name in home[1]}
    found = _confirm(copy, made) if moved else None
    if found is None:
        return None
    left = set(stored[0].parts) - {place.suffix for place in moved}
    return MovedParts(moved, tuple(sorted(left)), False, found)


def _without_doubtful(found: Mapping[str, MovedParts], here: PartIndex) -> dict[str, MovedParts]:
    """Return the moves whose parts say whose they are.

    A part of few numbers does so only if it goes round: where it belongs, another one stands that
    belongs here, or to a third weight that has moved as well.
    """
    made = {}
    for key, one in found.items():
        small = all(_numbers(here, place) < FEW for place in one.moved)
        if small and not one.copied and not all(p.key in found for p in one.moved.values()):
            continue
        made[key] = one
    return made


def _numbers(here: PartIndex, place: Place) -> int:
    """Return how many bytes the part at a place has, in fours."""
    part = here.part(place)
    return 0 if part is None else part.info.nbytes // 4


def _make_finding(
    key: str, one: MovedParts, says: tuple[str, str], row: TensorDiff, here: PartIndex, side: str
) -> Finding:
    """Return the finding of one tensor, with the names that its parts should have in `values`."""
    if one.found is not None:
        evidence = (*says, *one.found.evidence[1:])
        made = replace(one.found, cause="exchanged_parts", says=says[0], evidence=evidence)
        if one.found.certainty == "confirmed":  # what is left is the rounding of the encoding
            made = replace(made, residual_after=0.0)
    else:
        parts = [part for place in one.moved if (part := here.part(place)) is not None]
        data = bytes(parts[0].raw(0, min(HEAD, parts[0].info.nbytes)))
        proof = prove_bytes(data, sum(part.info.nbytes for part in parts), 0)
        before = None if row.stats is None else row.stats.rel_l2
        made = make_finding("exchanged_parts", (key,), says, before, 0.0, proof)
    made = replace(made, side=side, where=(key,))
    renames = {}
    for place, source in ({} if one.copied else one.moved).items():
        part, right = here.part(place), here.part(source)
        if part is not None and right is not None:
            # B's part here belongs there by its bytes; by the values, the part there belongs here.
            old, new = (part, right) if one.found is None else (right, part)
            renames[old.info.name] = new.info.name
    return replace(made, values={**made.values, "renames": renames}) if renames else made


def _sentence(side: str, one: MovedParts) -> str:
    """Return the general sentence on what moved, without names of weights."""
    names = _part_words({place.suffix for place in one.moved})
    stacked = all(place.key == source.key for place, source in one.moved.items())
    whose = "other experts" if stacked else "other packed weights"
    if one.copied:
        return f"{side}'s {names} are copies of those of {whose}: its own are not there"
    kept = f", and {_part_words(set(one.kept))} are its own" if one.kept else ""
    return f"{side}'s {names} are those of {whose}{kept}"


def _part_words(suffixes: Collection[str]) -> str:
    """Return the names of parts in words, as "codes, qzeros and scales"."""
    names = sorted(suffix.rsplit(".", 1)[-1] or "codes" for suffix in suffixes)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _place_sentence(one: MovedParts, here: PartIndex) -> str:
    """Return the sentence that names whose parts these are, or where its own are."""
    said = []
    for place, source in one.moved.items():
        mine, there = here.part(place), here.part(source)
        if mine is None or there is None:
            continue
        if one.found is None or one.copied:
            said.append(f"{mine.info.name} has those of {there.info.name}")
        else:
            said.append(f"those of {mine.info.name} are under {there.info.name}")
    return first_and_more(said, SHOWN)


part_groups = groups_by_side(_explain_side)

HYPOTHESES = (
    JointHypothesis(
        ("exchanged_parts",),
        part_groups,
        380,
        "whole parts of other weights, before any relation of values",
        weak=WEAK,
    ),
)
