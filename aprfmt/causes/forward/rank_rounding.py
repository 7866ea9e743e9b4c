"""The hypothesis that some tensor-parallel ranks compute in a shorter float type than others."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Mismatch, Patch
from aprfmt.causes.forward.rounding import round_to_type
from aprfmt.causes.forward.shards import role_of
from aprfmt.inference.replay.shadow import ShadowPoint
from aprfmt.measure.distances import exact_16_bit_type, rel_l2

_SHOWN = 8  # ranks that one sentence names
_TYPES = ("bfloat16", "float16")
Operation = tuple[str, str]  # an operation's name, and of a product the role of its weight


@dataclass(frozen=True)
class ShortRanks:
    """The `ranks` of `count` that round what they compute to `dtype`, while the others do not."""

    ranks: tuple[int, ...]
    count: int
    dtype: str

    @property
    def says(self) -> str:
        """The type and the ranks in words, as the end of a sentence."""
        word = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{self.dtype} by {word} {join_first(self.ranks, _SHOWN)} of {self.count}"


def find_short_ranks(case: Mismatch) -> Iterator[Change]:
    """Yield the change that some ranks round what they compute to a 16-bit type, others do not.

    Only dumps of several ranks are looked at. The operations that round are those whose recorded
    results have, in the columns of the same ranks, numbers of that type alone.
    """
    found = short_ranks(case, case.view)
    if found is None:
        return
    views = [view for view in case.found.views.values() if view.recorded is not None]
    rounded = {
        operation
        for view in views
        if (operation := _operation_of(case, view)) is not None and short_ranks(case, view) == found
    }
    if rounded:
        yield Change(
            "rounding",
            f"results are rounded to {found.says}, and not by the others",
            tuple(sorted({name for name, _ in rounded})),
            _round_of_ranks(rounded, found),
            {"dtype": found.dtype, "ranks": list(found.ranks)},
        )


def short_ranks(case: Mismatch, view: ShadowPoint) -> ShortRanks | None:
    """Return the ranks of a dump whose columns of a point are the reference's in a shorter type.

    The columns of the other ranks are the reference's own, and no numbers of that type. None for
    another trace, and where the columns of a rank are neither, or those of all ranks are alike.
    """
    dump = case.recorded.trace.run.get("dump")
    sizes = dump["ranks"].values() if isinstance(dump, Mapping) else ()
    for count in dict.fromkeys(int(size) for size in sizes):
        for dtype in _TYPES if count > 1 else ():
            ranks = _ranks_with(view, count, dtype)
            if ranks:
                return ShortRanks(tuple(ranks), count, dtype)
    return None


def _ranks_with(view: ShadowPoint, count: int, dtype: str) -> list[int]:
    """Return the ranks of `count` whose columns of a point are the reference's, rounded to `dtype`.

    [] where the columns of another rank are not the reference's own, or are numbers of `dtype`.
    """
    mine, theirs = view.mine.reshape(len(view.mine), -1), view.theirs.reshape(len(view.theirs), -1)
    if mine.shape != theirs.shape or mine.shape[1] % count:
        return []
    found = []
    pairs = zip(np.split(mine, count, 1), np.split(theirs, count, 1), strict=True)
    for rank, (own, other) in enumerate(pairs):
        short = exact_16_bit_type(other) == dtype
        wanted = round_to_type(own, dtype) if short else own
        if not rel_l2(wanted, other) <= 3 * view.tolerance:
            return []
        if short:
            found.append(rank)
    return [] if len(found) == count else found


def _operation_of(case: Mismatch, view: ShadowPoint) -> Operation | None:
    """Return the operation whose result is a point's value; None where no operation gives it."""
    for call in reversed(view.calls):
        result = case.array(call.result)
        if result.size == view.mine.size and len(result) == len(view.mine):
            if np.array_equal(result.reshape(view.mine.shape), view.mine):
                key = str(getattr(call.args[1], "key", "")) if len(call.args) > 1 else ""
                return call.op, role_of(key) if key else ""
    return None


def _round_of_ranks(rounded: Set[Operation], short: ShortRanks) -> Patch:
    """Return a patch: in results of operations the columns of some ranks are rounded."""

    def override_of(name: str) -> Any:
        """Return the override of the operation `name`."""

        def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the operation's result with the ranks' columns rounded, in its own dtype."""
            y = op(*args, **kwargs)
            key = str(getattr(args[1], "key", "")) if len(args) > 1 else ""
            if (name, role_of(key) if key else "") not in rounded:
                return y
            made: Array = np.array(y).reshape(len(y), -1)
            if made.shape[1] % short.count:
                return y
            for rank, block in enumerate(np.split(made, short.count, 1)):
                if rank in short.ranks:
                    block[...] = round_to_type(block, short.dtype)
            return made.reshape(y.shape).astype(y.dtype)

        return override

    def make(patched: Any, layers: Any) -> Any:
        """Return the model `patched` with the operations of `rounded` overridden in `layers`."""
        for name in sorted({name for name, _ in rounded}):
            patched = patched.with_op(name, override_of(name), layers)
        return patched

    return make


HYPOTHESES = (
    Hypothesis("rounding", find_short_ranks, 118, "the right rule, rounded on some ranks alone"),
)
