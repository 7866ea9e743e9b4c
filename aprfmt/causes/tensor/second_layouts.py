"""Parameters that one model stores twice, in two layouts, such as experts apart and stacked.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

A weight that is stored packed and plain is another. Loaders differ in which of the two they take,
so the two have to hold the same values.
"""

import math
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import fixed_name
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.pair_comparison import compare_pair
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import EQUAL, FLOATS, TensorVerdict
from aprfmt.measure.row_reader import RowReader
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared, Side, State
from aprfmt.model.relations import opening_path
from aprfmt.tensors.view import View

CAUSE_ROWS = (
    Cause(
        "stored_twice", "tensor", "same",
        "One side stores parameters twice, in two layouts, with the same values: experts singly "
        "and in a stack, query, key and value joined and apart, or packed and plain.",
        "Tensors without a role that together are, in another layout, a role that is read from "
        "other tensors.",
        "Read by its own layout each of them holds the values of the role.",
        next="nothing",
    ),
    Cause(
        "stale_layout", "tensor", "bug",
        "One side stores parameters twice, in two layouts, with other values: an older state "
        "was left next to the new one, and loaders differ in which of the two they take.",
        "Tensors without a role that together are, in another layout, a role that is read from "
        "other tensors.",
        "Read by its own layout one of them holds other values than the role.",
        next="look",
    ),
)  # fmt: skip

COPIES: frozenset[TensorVerdict] = EQUAL | {"WITHIN"}  # the same values, or rounded ones
_SHOWN = 2


@dataclass(frozen=True, slots=True)
class SecondLayout:
    """A parameter that a model stores in two layouts: `first` is read, `second` is not.

    `second` may lack some of the experts. `verdict` is that of comparing those that both have.
    """

    first: View
    second: View
    verdict: TensorVerdict

    @property
    def is_copy(self) -> bool:
        """Whether both layouts have the same values, or one has the other's values rounded."""
        return self.verdict in COPIES

    @property
    def lacks(self) -> int:
        """The number of experts that the second layout has not."""
        return len(_missing_experts(self.first, self.second))


def second_layouts(model: Model) -> Iterator[SecondLayout]:
    """Yield each parameter that a model stores in two layouts, and whether both have equal values.

    For an unknown architecture only weights that are stored both packed and plain are found.
    """
    for name, plain in model.plain_duplicates.items():
        yield SecondLayout(model[name], plain, _verdict(model[name], plain))
    try:
        found = model.resolution
    except ArchError:
        return
    for second in found.again:
        first = found.roles[second.name]
        yield SecondLayout(first, second, _verdict(first, second))


def _missing_experts(whole: View, part: View) -> tuple[int, ...]:
    """Return the numbers of the experts of a tensor that its second layout lacks."""
    there = () if part.group is None else part.group.experts
    return tuple(sorted(set(range(whole.shape[0])) - set(there))) if there else ()


def _verdict(one: View, other: View) -> TensorVerdict:
    """Return the verdict on the values of two tensors: UNREADABLE where one cannot be read.

    WITHIN also for two quantized tensors whose blocks run along different axes, if they agree
    within the rounding of both. Where `other` lacks experts of `one`, those that both have are
    compared.
    """
    if _missing_experts(one, other):
        return _verdict_on_experts(one, other)
    found = compare_pair(TensorPair(one.name, one, other))
    one.drop()
    other.drop()
    stats = found.stats
    if found.verdict == "DIFFERENT" and stats is not None and None in (one.runs, other.runs):
        noise = pair_noise(one.encoding, other.encoding, moved=False)
        coded = not {*one.encodings, *other.encodings} <= FLOATS
        return "WITHIN" if coded and stats.rel_l2 <= noise else found.verdict
    return found.verdict


def _verdict_on_experts(whole: View, part: View) -> TensorVerdict:
    """Return the verdict on the values of the experts that a second layout, `part`, has."""
    assert part.group is not None
    left = right = 0.0
    same = True
    rows = math.prod(whole.shape[1:-1])
    try:
        first, second = RowReader(whole), RowReader(part)
        for at, expert in enumerate(part.group.experts):
            x, y = (
                to_float64(side.take(np.arange(number * rows, (number + 1) * rows)))
                for side, number in ((first, expert), (second, at))
            )
            same = same and np.array_equal(x, y)
            left, right = left + float(np.square(x - y).sum()), right + float(np.square(x).sum())
    except AprfmtError:
        return "UNREADABLE"
    finally:
        whole.drop()
        part.drop()
    if same:
        return "SAME_VALUES"
    noise = pair_noise(whole.encoding, part.encoding, moved=False)
    return "WITHIN" if left <= noise**2 * right else "DIFFERENT"


def stored_names(views: Sequence[View]) -> tuple[str, ...]:
    """Return the distinct stored names of tensors, in order; for a packed one its codes' name."""
    stored = (tensor for view in views for tensor in view.stored)
    return tuple(dict.fromkeys(tensor.parts.get("", tensor).info.name for tensor in stored))


def names_text(views: Sequence[View]) -> str:
    """Return the first two stored names of tensors as text, with dots for more."""
    return join_first(stored_names(views), _SHOWN)


def second_layout_findings(a: Model, b: Model, keys: Collection[str]) -> Iterator[Finding]:
    """Yield findings for a side that stores parameters in two layouts while the other does not.

    `keys` are those of tensors that only one side has. If the two layouts have different values,
    the finding says which of them has the other side's.
    """
    for side, model, other in (("A", a, b), ("B", b, a)):
        alone = {*keys, *model.plain_duplicates} - {*other.plain_duplicates}
        found = [one for one in second_layouts(model) if not alone.isdisjoint(one.second.names)]
        for is_copy in (True, False):
            rows = [one for one in found if one.is_copy is is_copy and one.verdict != "UNREADABLE"]
            if rows:
                yield _twice_stored_finding(rows, side, model, other)


def _twice_stored_finding(
    rows: Sequence[SecondLayout], side: str, model: Model, other: Model
) -> Finding:
    """Return the finding of parameters that a model stores twice.

    `rows` are all copies, or all not. `side` is the model's letter, "A" or "B"; `other` is the
    other model.
    """
    seconds, firsts = [one.second for one in rows], [one.first for one in rows]
    where = stored_names(seconds)
    many = (
        f"{side} stores {len(rows)} parameter{'s' if len(rows) > 1 else ''} twice, in two layouts"
    )
    lost = sorted({one.lacks for one in rows if one.lacks})
    without = f" (without {' or '.join(map(str, lost))} of a layer's experts)" if lost else ""
    both = f"{names_text(seconds)}{without} and {names_text(firsts)}"
    if rows[0].is_copy:
        says, cause, proof, command = f"{many}: {both}", "stored_twice", True, ""
    else:
        of_first, of_second = (
            all(_holds_values_of(other, view) for view in views) for views in (firsts, seconds)
        )
        names = "AB".replace(side, "")
        whose = "; neither holds all values of the other side"
        if of_first:
            whose = f"; {names_text(firsts)} hold {names}'s values, which are read here"
        elif of_second:
            whose = f"; {names_text(seconds)} hold {names}'s values, which are not read here"
        says = f"{many}, with other values: {both}; loaders differ in which they take{whose}"
        cause, proof = "stale_layout", of_first != of_second
        command = drop_command(model, where) if of_first else ""
    return Finding(
        cause,
        says,
        "tensor",
        "same" if cause == "stored_twice" else "bug",
        where,
        True,
        side=side,
        keys=where,
        next=command,
        proof=unfitted_proof(len(rows)) if proof else None,
    )


def _holds_values_of(model: Model, view: View) -> bool:
    """Return whether a model has a tensor's role with the same values, rounded or not."""
    mine = model.find(view.name)
    fits = mine is not None and (mine.shape == view.shape or view.shape[1:] == mine.shape[1:])
    return mine is not None and fits and _verdict(mine, view) in COPIES


def drop_command(model: Model, names: Sequence[str]) -> str:
    """Return the `aprfmt convert` command that leaves out the tensors `names`; "" if there is none.

    There is none if its patterns would match other tensors too. Names that differ only in numbers
    share a pattern.
    """
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    taken = {name for name in model if any(fnmatchcase(name, one) for one in patterns)}
    if taken != set(names) or not taken.isdisjoint(model.plain_duplicates):
        return ""
    place = opening_path(model.path)
    drops = " ".join(f"--drop {shlex.quote(one)}" for one in patterns)
    return f"aprfmt convert {shlex.quote(str(place))} {fixed_name(place)} {drops}"


def unpaired_plain_tensors(a: Model, b: Model) -> Iterator[NotCompared]:
    """Yield a NotCompared for each differing plain tensor stored next to its packed form.

    Such a tensor has the name of the packed weight that is read in its place. It is yielded if only
    one model stores it, or the two models' values differ.
    """
    for name in dict.fromkeys((*a.plain_duplicates, *b.plain_duplicates)):
        mine, theirs = a.plain_duplicates.get(name), b.plain_duplicates.get(name)
        why = f"stores {name} again, next to its packed form"
        if mine is None or theirs is None:
            side: Side = "B" if mine is None else "A"
            state: State = "only in B" if mine is None else "only in A"
            yield NotCompared("tensor", name, state, why, side)
        elif _verdict(mine, theirs) not in EQUAL:
            yield NotCompared("tensor", name, "unequal", why)
