"""Answers whether B is the base A with an adapter merged: once, twice, in every shard.

For each weight the adapter changes, B - A is held against the change: by how many times it lies in
B, and whether nothing but rounding is left. The rest of B is compared with A as `diff` does.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.adapters.merging import MergedTensor, merged_model
from aprfmt.adapters.parameters import OTHER_ORDERS
from aprfmt.model import Model, open_model
from aprfmt.model.adapter_parts import adapter_parts
from aprfmt.model.ledger import Compared, NotCompared, Pronounced, Words, ledger, pronounce
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.compare.diffs import DiffReport

    F64 = NDArray[np.float64]

_CLOSE = ("SAME_BYTES", "SAME_VALUES", "WITHIN")
_FRACTIONS = {"BF16": 7, "F16": 10, "F32": 23}  # bits of a significand behind its point
_SUMS = 2.0**-20  # what sums in float32 are off by, relative to the largest value
_WORDS = Words("merged: ", "not merged as it should be: ", "not decided: ")
WORDS = {0: "not at all", 1: "once", 2: "twice"}


@dataclass(frozen=True)
class ChangedWeight:
    """One changed weight: B's shard, how many times the change lies in it, and what is left.

    `times` is the projection of B - A on the change; `rest` the norm of what it leaves, relative to
    the change; `found` is "once", "twice", "not at all", "N times", "otherwise", or the order in
    which the ranks of stacked experts were read, where that one gives B.
    """

    key: str
    file: str
    times: float
    rest: float
    found: str


@dataclass(frozen=True)
class AdapterAnswer:
    """The answer of one question: `found` of all weights, each of them, and what else differs."""

    adapter: str
    found: str
    weights: tuple[ChangedWeight, ...]
    others: tuple[str, ...]  # tensors that the adapter does not change, and that differ
    same: int = 0  # those that it does not change, and that agree
    left: tuple[NotCompared, ...] = ()  # what was not compared, of both models and the adapter

    def pronounced(self, accept: Collection[str] = ()) -> Pronounced:
        """Return the verdict over the weights, the other tensors, and what was not compared."""
        once = sum(each.found == "once" for each in self.weights)
        counts = {"weights": (once, len(self.weights)), "tensors": (self.same, self.same)}
        what = f"{self.found} ({len(self.weights)} weights)"
        return pronounce(_WORDS, Compared(not self.yes, counts, self.left, scope=what), accept)

    @property
    def yes(self) -> bool:
        """True where B is A with the adapter once in every weight, and nothing else."""
        return self.found == "once" and not self.others

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        found = asdict(self)
        del found["left"], found["same"]
        return {"merged": self.yes, **found}


def answers(a: Model, b: Model, adapter: Path) -> "tuple[AdapterAnswer, DiffReport]":
    """Return the answer, and the comparison of B with A plus the adapter."""
    from aprfmt.compare import diff_models

    model, opened, found = merged_model(a, adapter, again=True)
    with opened:
        report = diff_models(model, b, only=("tensors",), explain=False)
        changed = {
            name for name, one in model.source.tensors.items() if isinstance(one, MergedTensor)
        }
        weights = []
        others = []
        same = 0
        for row in report.tensors:
            mine = model.find(row.key)
            touched = mine is not None and bool(changed.intersection(mine.names))
            theirs = b.find(row.key)
            if touched and mine is not None and theirs is not None:
                weights.append(_weight(row.key, mine, theirs, row.verdict in _CLOSE))
            elif touched or row.verdict not in _CLOSE:
                others.append(row.key)
            else:
                same += 1
        if any(pair.parameters for pair in found.pairs.values()):
            weights = _in_other_orders(a, b, adapter, weights)
    left = (*report.not_compared, *_unread(found.path))
    answer = AdapterAnswer(
        str(found.path), _together(weights), tuple(weights), tuple(others), same, left
    )
    return answer, report


def _unread(adapter: Path) -> Iterator[NotCompared]:
    """Yield the tensors of an adapter that nothing reads: they may change the base.

    A merge takes every whole tensor of the base along, or is refused.
    """
    with open_model(adapter) as opened:
        taken = set(adapter_parts(opened).whole.values())
        for item in ledger(opened, ("tensor", "adapter tensor")).unread:
            if item.name in taken:
                continue
            yield NotCompared(item.kind, item.name, "only in A", item.of, "the adapter")


def _in_other_orders(
    a: Model, b: Model, adapter: Path, weights: "list[ChangedWeight]"
) -> "list[ChangedWeight]":
    """Return the weights, each with the order of ranks under which it is A with the change once."""
    for order in OTHER_ORDERS:
        if all(one.found != "otherwise" for one in weights):
            break
        model, opened, _ = merged_model(a, adapter, again=True, order=order)
        with opened:
            for at, one in enumerate(weights):
                mine, theirs = model.find(one.key), b.find(one.key)
                if one.found != "otherwise" or mine is None or theirs is None:
                    continue
                again = _weight(one.key, mine, theirs, False)
                if again.found == "once":
                    weights[at] = replace(again, found=order.says)
    return weights


def _weight(key: str, merged: View, b: View, close: bool) -> ChangedWeight:
    """Say how often the change lies in B's weight; `close`: it is A's with the change, rounded."""
    plain, full = (_side(merged, times) for times in (0, 1))
    theirs = b.numpy().astype(np.float64)
    change = full - plain
    size = float(np.square(change).sum())
    file = b.stored[0].path
    where = "" if file is None else file.name
    if not size:
        return ChangedWeight(
            key, where, 1.0 if close else 0.0, 0.0, "once" if close else "otherwise"
        )
    off = theirs - plain
    times = float((off * change).sum() / size)
    left = off - round(times) * change
    rest = float(np.sqrt(np.square(left).sum() / size))
    if round(times) == 1 and (close or _once_rounded(theirs, full, change, b.encoding)):
        return ChangedWeight(key, where, times, rest, "once")
    whole = abs(times - round(times)) < 0.05 and rest < 0.25 and round(times) != 1
    word = WORDS.get(round(times), f"{round(times)} times") if whole else "otherwise"
    return ChangedWeight(key, where, times, rest, word)


def _once_rounded(theirs: "F64", full: "F64", change: "F64", encoding: str) -> bool:
    """Say whether B's values are A's with the change, rounded to B's float type by some library.

    That one may have rounded the product to the same type first, as PEFT does in half precision,
    and its sums in float32 end elsewhere than ours: where a value lies halfway between two, it may
    then be the other one.
    """
    fraction = _FRACTIONS.get(encoding)
    if fraction is None:
        return False
    largest = np.maximum(np.abs(theirs), np.abs(full))
    half = np.ldexp(0.5, np.frexp(largest)[1] - 1 - fraction)
    product = np.ldexp(np.abs(change), -1 - fraction)
    return bool((np.abs(theirs - full) <= half + product + _SUMS * largest.max()).all())


def _side(merged: View, times: int) -> "np.ndarray[Any, Any]":
    """Return A's weight with the change so many times, before it is rounded to its dtype."""
    stored = []
    for one in merged.stored:
        if isinstance(one, MergedTensor):
            one = one.again(times)
        stored.append(one)
    view = View(*stored, role=merged.role, group=merged.group, hp=merged.sizes)
    return view.numpy().astype(np.float64)


def _together(weights: Sequence[ChangedWeight]) -> str:
    counts = Counter(each.found for each in weights)
    if len(counts) == 1:
        return next(iter(counts))
    if not counts:
        return "not at all"
    files = sorted({each.file for each in weights if each.found != "once"})
    said = ", ".join(f"{word} in {count}" for word, count in counts.most_common())
    return f"in part: {said} of {len(weights)} weights; not once in {', '.join(files[:5])}"
