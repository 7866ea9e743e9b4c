"""Faults of a file: the first one raises, or all are collected and reading continues.

A parser reports every fault that leaves other tensors readable to `Faults`; it raises only faults
that make everything after them unreadable. Commands that inspect broken files open them with
`damaged=True`; commands that use the content do not.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from aprfmt.base.protocols import Damage, Note, TensorInfo
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError


class Faults:
    """The faults of one file, which raise or are collected.

    `broken` maps a tensor name to the error that reading it raises. `damage` are the faults in
    order. With `collect` they are collected, and the first one does not raise.
    """

    __slots__ = ("_errors", "broken", "collect", "damage", "where")

    def __init__(self, where: str, collect: bool) -> None:
        """Start without faults; `where` names the file. `collect`: faults do not raise."""
        self.where = where
        self.collect = collect
        self.damage: list[Damage] = []
        self.broken: dict[str, FormatError] = {}
        self._errors: list[FormatError] = []

    def add(self, error: FormatError, *tensors: str, kind: str = "") -> None:
        """Raise `error`, or if faults are collected, add it and make reading of `tensors` raise it.

        `kind` is that of the damage, if `error` does not have it.
        """
        if not self.collect:
            raise error
        self._errors.append(error)
        text = str(error).removeprefix(f"{self.where}: ")
        self.damage.append(Damage(self.where, text, tensors, kind or error.kind))
        for name in tensors:
            self.broken.setdefault(name, error)

    def cut(self, error: FormatError, tensors: Sequence[str]) -> None:
        """Raise, or collect, the error that the file ends before these tensors end.

        Reading one of them then raises which bytes are missing (`mapped_file.CutTensor`).
        """
        self.add(error)
        self.damage[-1] = replace(self.damage[-1], tensors=tuple(tensors))

    def spoil(self, error: FormatError, tensors: Sequence[str]) -> None:
        """Make reading these tensors raise a fault that was collected already."""
        at = self._errors.index(error)
        self.damage[at] = replace(self.damage[at], tensors=tuple(tensors))
        for name in tensors:
            self.broken.setdefault(name, error)

    def first(self, error: FormatError) -> FormatError:
        """Return the first collected error; without one, `error`, which ended parsing."""
        return self._errors[0] if self._errors else error

    def rename(self, names: Mapping[str, str]) -> None:
        """Replace tensor names in the collected faults; `names` maps old names to new.

        Tensors of encodings that a format lacks are stored under another name.
        """
        self.broken = {names.get(name, name): error for name, error in self.broken.items()}
        self.damage = [
            replace(one, tensors=tuple(names.get(name, name) for name in one.tensors))
            for one in self.damage
        ]


class Structure:
    """Base of every format's file structure: tensors, faults, and notes on them."""

    __slots__ = ()

    where: str
    faults: Faults
    infos: dict[str, TensorInfo]
    notes: list[Note]

    def undamaged_infos(self) -> list[TensorInfo]:
        """Return the infos of the tensors that have no fault so far."""
        return [info for name, info in self.infos.items() if name not in self.faults.broken]

    def warn(self, key: str, text: str, where: str = "") -> None:
        """Add a warning note; `key` is one of WARNINGS, `where` defaults to the file."""
        self.notes.append(Note("warning", where or self.where, text, key))

    def remark(self, text: str) -> None:
        """Add a note on something that is unusual, but harmless."""
        self.notes.append(Note("note", self.where, text, "remark"))


def report_overlap(infos: Sequence[TensorInfo], faults: Faults) -> None:
    """Add a fault for every group of tensors that share bytes."""
    for blamed, others in find_overlaps([(i.offset, i.offset + i.nbytes) for i in infos]):
        info, stop = infos[blamed[0]], infos[blamed[0]].offset + infos[blamed[0]].nbytes
        what = f"{faults.where}: {tensor_label(info.name)} ({info.offset}..{stop}) overlaps"
        if len(blamed) == 1:
            what += f" {others} other tensors"
        else:
            before = infos[blamed[1]]
            what += f" {tensor_label(before.name)}, which ends at {before.offset + before.nbytes}"
        faults.add(FormatError(what), *(infos[i].name for i in blamed))


def tensor_label(name: str) -> str:
    """Return a tensor's name as messages show it: shortened and quoted."""
    return f"tensor {shorten(name, 100)!r}"


def find_overlaps(extents: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (numbers of the extents to blame, how many others they overlap).

    An extent that overlaps several others is blamed alone. Of two that overlap only each other,
    both are blamed, the later one first. Empty extents do not count.
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
