"""Finds ranks of a dump that hold a shorter type than the others."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from aprfmt.base.dump_names import rank_of_axis
from aprfmt.inference.engines.rank_joining import DumpedArray

_LOOKED = 4  # arrays of each rank: the last of a step, which are computed
_SHORT = ("bfloat16", "float16")


def ranks_of_another_type(
    found: Sequence[tuple[int, DumpedArray]], axis: str
) -> Iterator[tuple[str, str]]:
    """Yield (rank, type) of ranks along `axis` that hold a shorter type than the others.

    `found` are (step, array). It is so in a few arrays of which every rank has a part.
    """
    parts: dict[tuple[int, str], dict[int, DumpedArray]] = {}
    for step, one in found:
        if len(one.shape) > 1 and "float" in one.dtype and axis in one.ranks:
            parts.setdefault((step, one.name), {})[one.ranks[axis]] = one
    ranks = {rank for row in parts.values() for rank in row}
    rows = [row for row in parts.values() if row.keys() == ranks][-_LOOKED:]
    if len(ranks) < 2 or len(rows) < _LOOKED:
        return
    for kind in _SHORT:
        held = _holders(rows, kind)
        if held is not None and 0 < 2 * len(held) <= len(ranks):
            for rank in sorted(held):
                yield f"{rank_of_axis(axis)} {rank}", kind
            return


def _holders(rows: Sequence[Mapping[int, DumpedArray]], kind: str) -> Collection[int] | None:
    """Return the ranks that hold a type in every row; None if some are in a part of them.

    `rows` are arrays by rank.
    """
    each = [{rank for rank, one in row.items() if one.dtype == kind} for row in rows]
    return each[0] if all(one == each[0] for one in each) else None
