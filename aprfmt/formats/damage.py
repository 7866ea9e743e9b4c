"""What is wrong with a file: raised at the first fault, or collected so that reading goes on.

A parser reports every fault that leaves the rest readable to `Faults`, and raises only what makes
everything after it unreadable. Whoever opens a file says which it is to be: `damaged=True` for
commands that look at broken files, nothing for those that build on what they read.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from aprfmt.base.protocols import Damage, TensorInfo
from aprfmt.base.text import shorten
from aprfmt.errors import FormatError


class Faults:
    """The faults of one file. `broken` has the error that reading a tensor is to raise."""

    __slots__ = ("_errors", "broken", "collect", "damage", "where")

    def __init__(self, where: str, collect: bool) -> None:
        self.where = where
        self.collect = collect
        self.damage: list[Damage] = []
        self.broken: dict[str, FormatError] = {}
        self._errors: list[FormatError] = []

    def add(self, error: FormatError, *tensors: str) -> None:
        """Raise `error`, or note it and that the bytes of `tensors` cannot be had."""
        if not self.collect:
            raise error
        self._errors.append(error)
        text = str(error).removeprefix(f"{self.where}: ")
        self.damage.append(Damage(self.where, text, tensors, error.kind))
        for name in tensors:
            self.broken.setdefault(name, error)

    def cut(self, error: FormatError, tensors: Sequence[str]) -> None:
        """Raise `error`, or note that the file ends before these tensors do.

        Reading one of them says which bytes are not there (`mapped.CutTensor`).
        """
        self.add(error)
        self.damage[-1] = replace(self.damage[-1], tensors=tuple(tensors))

    def spoil(self, error: FormatError, tensors: Sequence[str]) -> None:
        """Say that a fault added before concerns these tensors: reading one raises it."""
        at = self._errors.index(error)
        self.damage[at] = replace(self.damage[at], tensors=tuple(tensors))
        for name in tensors:
            self.broken.setdefault(name, error)

    def first(self, error: FormatError) -> FormatError:
        """Return the fault that came before the one that ends parsing, or that one itself."""
        return self._errors[0] if self._errors else error

    def rename(self, names: Mapping[str, str]) -> None:
        """Speak of tensors by other names, as those of carried encodings have."""
        self.broken = {names.get(name, name): error for name, error in self.broken.items()}
        self.damage = [
            replace(one, tensors=tuple(names.get(name, name) for name in one.tensors))
            for one in self.damage
        ]


def report_overlap(infos: Sequence[TensorInfo], faults: Faults) -> None:
    """Report the tensors of a file that share bytes."""
    for blamed, others in overlapping([(i.offset, i.offset + i.nbytes) for i in infos]):
        info, stop = infos[blamed[0]], infos[blamed[0]].offset + infos[blamed[0]].nbytes
        what = f"{faults.where}: {_tensor(info.name)} ({info.offset}..{stop}) overlaps"
        if len(blamed) == 1:
            what += f" {others} other tensors"
        else:
            before = infos[blamed[1]]
            what += f" {_tensor(before.name)}, which ends at {before.offset + before.nbytes}"
        faults.add(FormatError(what), *(infos[i].name for i in blamed))


def _tensor(name: str) -> str:
    return f"tensor {shorten(name, 100)!r}"


def overlapping(extents: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (numbers of the extents to blame, how many others they reach into).

    One that reaches into several others is wrong by itself; of two that overlap each other and
    nothing else, both are suspect: then the later one comes first. Empty extents do not count.
    """
    numbers = [i for i, (start, stop) in enumerate(extents) if start < stop]
    starts = sorted(extents[i][0] for i in numbers)
    stops = sorted(extents[i][1] for i in numbers)
    rest: list[int] = []
    for i in sorted(numbers, key=lambda i: extents[i]):
        start, stop = extents[i]
        others = bisect_left(starts, stop) - bisect_right(stops, start) - 1
        if others > 1:
            yield (i,), others
        else:
            rest.append(i)
    for before, i in pairwise(rest):
        if extents[i][0] < extents[before][1]:
            yield (i, before), 1
