"""Tensors cut from one flat buffer in another order than the buffer was filled in.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

ZeRO and FSDP keep parameters as one vector. A *run* is values that follow each other both there and
in a tensor. Cut by the names in another order, or from another offset, every tensor has its right
shape and values of others, which run over the tensors' ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_values
from aprfmt.codecs import encode
from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "flat_order", "tensor", "bug",
        "Tensors were cut from one flat buffer (ZeRO, FSDP) in another order than it was filled, "
        "or from another place.",
        "Names and shapes are right, and most tensors relate to nothing under their names.",
        "Runs of the other side's values, one after the other, give all values of these "
        "tensors.",
        next="again",
    ),
)  # fmt: skip

MOST = 1 << 27  # values of all tensors of a side that are searched
FEWEST = 3  # tensors that runs over their ends must concern
ANCHOR = 16  # bytes that are looked up; so many must be of different values
LOOKED = 1 << 12  # values of a tensor among which its anchor is looked for
HITS = 8  # places of an anchor that are tried
JUDGED = 64  # values that tell a place at once
SHARE = 0.9  # of the values of these tensors that must be found
SHOWN = 2
WINDOW = 1 << 22  # values looked up together
WEAK = (
    "wrong_rows", "row_offset", "head_order", "stale_tensor", "byte_offset", "bit_rot",
    "swapped_tensors", "copied_tensor", "layer_order", "derived", "scale", "function_of",
    "expert_order",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Values [start, start + count) of A's tensor `source`, found in one of B's from `place`."""

    place: int
    source: str
    start: int
    count: int


@dataclass
class _Pool:
    """The differing tensors of both sides as bits of the coarser type, {key: 1-d array} each."""

    a: dict[str, "Array"] = field(default_factory=dict)
    b: dict[str, "Array"] = field(default_factory=dict)


def flat_groups(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield one function that returns {tensor key: finding} of tensors cut from one buffer.

    Nothing where too few tensors are unexplained, or they are too large.
    """
    open_rows = [key for key, row in rows.items() if row.is_unexplained(WEAK)]
    total = sum(row.stats.count for key in open_rows if (row := rows[key]).stats is not None)
    if len(open_rows) >= FEWEST and total <= MOST:
        yield partial(_explain_flat, context, pairs, rows, open_rows)


def _explain_flat(
    context: PairContext,
    pairs: Mapping[str, TensorPair],
    rows: Mapping[str, TensorDiff],
    keys: Sequence[str],
) -> dict[str, Finding]:
    """Return {tensor key: finding} of tensors that consist of runs of A's values; or {}."""
    pool = _pool_of(pairs, keys)
    if pool is None:
        return {}
    starts = _places_of_starts(pool.a, pool.b)  # of A's tensors, in B's
    begins = _places_of_starts(pool.b, pool.a)  # of B's tensors, in A's
    runs = {key: _runs_of(key, pool, starts, begins.get(key, [])) for key in pool.b}
    # Whole tensors in each other's places are a simpler cause.
    cut = [
        key
        for key, own in runs.items()
        if len(own) > 1 or any(run.count < pool.a[run.source].size for run in own)
    ]
    found = {key: own for key, own in runs.items() if own}
    values = sum(data.size for data in pool.b.values())
    known = sum(run.count for own in found.values() for run in own)
    if len(cut) < FEWEST or known < SHARE * values:
        return {}
    over = sum(len({run.source for run in own}) > 1 for own in found.values())
    if over < FEWEST:
        return {}
    share = known / values
    held = f"all {values} values" if share == 1 else f"{100 * share:.4g} % of {values} values"
    once = ", each once" if _each_once(found, pool) else ""
    text = (
        f"B's tensors are cut from one flat buffer (ZeRO, FSDP) in another order, or from another "
        f"place, than it was filled: {held} of {len(pool.b)} tensors are A's{once}, and {over} "
        "tensors run over the ends of A's"
    )
    made = {}
    for key, own in found.items():
        row = rows[key]
        before = None if row.stats is None else row.stats.rel_l2
        judged = sum(run.count for run in own)
        proof = prove_values(pool.b[key][:JUDGED].astype(np.float64), judged, 2 * len(own), 0.0)
        proof = replace(proof, share=share)
        made[key] = make_finding("flat_order", (key,), (text, _runs_text(own)), before, 0.0, proof)
    return made


def _pool_of(pairs: Mapping[str, TensorPair], keys: Sequence[str]) -> _Pool | None:
    """Return the tensors of both sides in one type; None where they are not plain floats.

    None, too, where all are parts of one stored tensor: that is no buffer of many.
    """
    sides = [(key, pairs[key].a, pairs[key].b) for key in keys]
    stored = (
        {one.info.name for view in views if view for one in view.stored}
        for views in list(zip(*sides, strict=True))[1:]
    )
    if any(len(held) < 2 for held in stored):
        return None
    names = {name for _, a, b in sides for view in (a, b) if view for name in view.encodings}
    if not names or not names <= UNIT.keys():
        return None
    coarse = max(names, key=lambda name: UNIT[name])
    pool = _Pool()
    for key, a, b in sides:
        if a is None or b is None or a.shape != b.shape:
            return None
        try:
            pool.a[key], pool.b[key] = (_bits(view, coarse) for view in (a, b))
        except AprfmtError:
            return None
        finally:
            pairs[key].drop()
    return pool


def _bits(view: View, encoding: str) -> "Array":
    """Return a tensor's values rounded to a type, as unsigned integers of its width, [values]."""
    values = np.ascontiguousarray(view.numpy(), np.float32)
    raw = encode(encoding, values)[""]
    count = max(1, values.size)
    found: Array = np.frombuffer(raw, f"<u{len(memoryview(raw).cast('B')) // count}")
    return found


def _window_keys(data: "Array") -> "Array":
    """Return a hash (uint64) of the ANCHOR bytes that begin at each value, [values - few]."""
    each = ANCHOR // data.itemsize
    count = data.size - each + 1
    made = np.zeros(max(0, count), np.uint64)
    factor = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for at in range(each if count > 0 else 0):
            made = (made ^ data[at : at + count].astype(np.uint64)) * factor
            made ^= made >> np.uint64(29)
    return made


def _anchor_of(data: "Array") -> int | None:
    """Return the first index from which an anchor's values are all different; None for none."""
    each = ANCHOR // data.itemsize
    some = data[:LOOKED]
    if some.size < each:
        return None
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(some, each), axis=1)
    varied = (np.diff(windows, axis=1) != 0).all(1)
    return int(np.argmax(varied)) if varied.any() else None


def _places_of_starts(
    wanted: Mapping[str, "Array"], held: Mapping[str, "Array"]
) -> dict[str, list[tuple[str, int]]]:
    """Return {tensor of `wanted`: where it begins in `held`, as (tensor, index of the value)}.

    At most HITS for each tensor. Tensors whose first values do not identify them are left out.
    """
    anchors: dict[int, list[tuple[str, int]]] = {}
    for key, data in wanted.items():
        at = _anchor_of(data)
        if at is not None:
            number = int(_window_keys(data[at : at + ANCHOR // data.itemsize])[0])
            anchors.setdefault(number, []).append((key, at))
    known = np.sort(np.array(list(anchors), np.uint64))
    found: dict[str, list[tuple[str, int]]] = {}
    each = ANCHOR // next(iter(held.values())).itemsize
    for there, data in held.items():
        for begin in range(0, data.size, WINDOW):
            keys = _window_keys(data[begin : begin + WINDOW + each - 1])
            near = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            for hit in np.flatnonzero(known[near] == keys).tolist() if len(known) else ():
                for key, at in anchors[int(keys[hit])]:
                    place = begin + hit - at
                    mine = wanted[key]
                    count = min(JUDGED, data.size - place, mine.size)
                    if place < 0 or len(found.setdefault(key, [])) >= HITS:
                        continue
                    if np.array_equal(data[place : place + count], mine[:count]):
                        found[key].append((there, place))
    return found


def _runs_of(
    key: str,
    pool: _Pool,
    starts: Mapping[str, Sequence[tuple[str, int]]],
    begins: Sequence[tuple[str, int]],
) -> list[Run]:
    """Return the runs of A's values that are found in B's tensor `key`, in its order.

    Values of B that no run explains, such as padding, are skipped up to the next place at which one
    of A's tensors is known to begin. `begins` are (tensor of A, place in it) at which B's tensor
    may begin, `starts` the (tensor of B, place in it) at which each tensor of A may begin.
    """
    data = pool.b[key]
    inside = {
        place: source
        for source, places in starts.items()
        for there, place in places
        if there == key
    }
    made: list[Run] = []
    at = 0
    while at < data.size:
        choices = [(inside[at], 0)] if at in inside else []
        choices += [(source, start) for source, start in begins if not at]
        choices += [(source, 0) for source in pool.a if source not in starts] if at else []
        run = _longest_run(data, at, choices, pool.a)
        if run is None:
            later = [place for place in inside if place > at]
            if not later:
                break
            at = min(later)  # padding, or a tensor that is not among these
            continue
        made.append(run)
        at += run.count
    return made


def _longest_run(
    data: "Array", at: int, choices: Sequence[tuple[str, int]], sources: Mapping[str, "Array"]
) -> Run | None:
    """Return the longest run from `at` on among `choices`, (tensor, first value) each, or None.

    A run goes to the end of its tensor, or of `data`.
    """
    best: Run | None = None
    for source, start in choices:
        held = sources[source]
        count = min(held.size - start, data.size - at)
        if count > (best.count if best else 0) and np.array_equal(
            held[start : start + count], data[at : at + count]
        ):
            best = Run(at, source, start, count)
    return best


def _each_once(found: Mapping[str, Sequence[Run]], pool: _Pool) -> bool:
    """Return whether the runs together have every value of A's tensors exactly once."""
    used: dict[str, list[tuple[int, int]]] = {key: [] for key in pool.a}
    for own in found.values():
        for run in own:
            used[run.source].append((run.start, run.start + run.count))
    for key, parts in used.items():
        at = 0
        for start, stop in sorted(parts):
            if start != at:
                return False
            at = stop
        if at != pool.a[key].size:
            return False
    return True


def _runs_text(own: Sequence[Run]) -> str:
    """Return in words which runs of A's tensors a tensor of B consists of."""
    parts = [
        f"values {run.place} to {run.place + run.count - 1} are A's {run.source} from value "
        f"{run.start} on"
        for run in own[:SHOWN]
    ]
    more = f", and {len(own) - SHOWN} more runs" if len(own) > SHOWN else ""
    return "; ".join(parts) + more


HYPOTHESES = (
    JointHypothesis(
        ("flat_order",),
        flat_groups,
        385,
        "one order of a buffer, before what each of its tensors looks like",
        weak=WEAK,
    ),
)
