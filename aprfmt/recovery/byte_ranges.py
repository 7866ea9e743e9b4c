"""Byte ranges of a file: joining them, and what lies between them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of a file, and why they matter."""

    start: int
    stop: int
    why: str


def join_ranges(ranges: Sequence[Range], end: int) -> list[Range]:
    """Return ranges in order, cut at `end`; those that touch or overlap are joined.

    A joined range has the reasons of all ranges in it.
    """
    found: list[Range] = []
    for one in sorted(ranges, key=lambda one: (one.start, one.stop)):
        start, stop = one.start, min(one.stop, end)
        if start >= stop:
            continue
        if found and start <= found[-1].stop:
            last = found[-1]
            reasons = dict.fromkeys([*last.why.split(", "), *one.why.split(", ")])
            found[-1] = Range(last.start, max(last.stop, stop), ", ".join(reasons))
        else:
            found.append(Range(start, stop, one.why))
    return found


def remaining_ranges(known: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the (start, stop) ranges of [0, end) that none of the known ranges covers."""
    found, at = [], 0
    for start, stop in [*sorted(known), (end, end)]:
        if start > at:
            found.append((at, min(start, end)))
        at = max(at, stop)
        if at >= end:
            break
    return found
