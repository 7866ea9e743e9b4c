"""Finds ranks of a dump that hold, or computed in, a shorter type than the others."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np

from aprfmt.base.dump_names import rank_of_axis
from aprfmt.errors import FormatError
from aprfmt.inference.engines.rank_joining import DumpedArray
from aprfmt.measure.distances import exact_16_bit_type

_LOOKED = 4  # arrays of each rank: the last of a step, which are computed
_SHORT = ("bfloat16", "float16")


def ranks_of_another_type(
    found: Sequence[tuple[int, DumpedArray]], axis: str
) -> Iterator[tuple[str, str]]:
    """Yield (rank, type) of the ranks along `axis` whose values are of a shorter type.

    `found` are (step, array). A rank is yielded if its values in the last few arrays that all ranks
    have are of that type, and at most half of the ranks are so. The values may be stored as float32
    all the same.
    """
    parts: dict[tuple[int, str], dict[int, DumpedArray]] = {}
    for step, one in found:
        if len(one.shape) > 1 and "float" in one.dtype and axis in one.ranks:
            parts.setdefault((step, one.name), {})[one.ranks[axis]] = one
    ranks = {rank for row in parts.values() for rank in row}
    rows = [row for row in parts.values() if row.keys() == ranks][-_LOOKED:]
    if len(ranks) < 2 or len(rows) < _LOOKED:
        return
    each = [{rank: _type_of_values(one) for rank, one in row.items()} for row in rows]
    for kind in _SHORT:
        held = _ranks_of_type(each, kind)
        if held is not None and 0 < 2 * len(held) <= len(ranks):
            for rank in sorted(held):
                yield f"{rank_of_axis(axis)} {rank}", kind
            return


def _type_of_values(one: DumpedArray) -> str:
    """Return the 16-bit type that holds a float32 array's values exactly, else its own dtype.

    Its stored bytes are read until one value fits no such type. Zeros alone show no type, nor does
    an array whose bytes are compressed or cannot be read.
    """
    stored = one.stored() if one.dtype == "float32" and sys.byteorder == "little" else None
    if stored is None:
        return one.dtype
    kinds: set[str] = set()
    try:
        with closing(stored.windows()) as windows:
            for window in windows:
                values = np.frombuffer(window, np.float32)
                if np.any(values):
                    kinds.add(exact_16_bit_type(values))
                if "" in kinds or len(kinds) > 1:
                    return one.dtype
    except (FormatError, ValueError):
        return one.dtype
    return next(iter(kinds), one.dtype)


def _ranks_of_type(rows: Sequence[Mapping[int, str]], kind: str) -> Collection[int] | None:
    """Return the ranks whose type is `kind` in every row; None if they differ by row.

    Each row is {rank: type} of one array.
    """
    each = [{rank for rank, own in row.items() if own == kind} for row in rows]
    return each[0] if all(one == each[0] for one in each) else None
