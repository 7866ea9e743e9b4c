"""Rows that are other rows of A: shifted, of another layer or expert, or repeated.

A *run* is rows of B that follow each other both there and in the tensor of A that they come from. A
*guess* is a change of one tensor of a pair after which both should be equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_bytes
from aprfmt.causes.tensor.rearrangements import expected_heads
from aprfmt.causes.tensor.row_sources import JoinedRows, find_sources, source_runs
from aprfmt.measure.byte_ranges import numbered_text
from aprfmt.measure.findings import Finding
from aprfmt.measure.row_reader import RowReader

if TYPE_CHECKING:
    from aprfmt.causes.tensor.context import PairContext
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "wrong_rows", "tensor", "bug",
        "Rows, heads or experts hold the values of other ones: of a neighbour, another layer, or "
        "one of them twice.",
        "The differing rows equal other rows of the other side, which stand there as well.",
        "Every differing row is found, to the bit, at the printed place.",
    ),
)  # fmt: skip

COLUMNS = 8  # below so many values a row is not known by them
POOL = 1 << 31  # values of A looked through
MOST = 0.5  # share of the differing rows that must be found for a word about it
MOST_VALUES = 1 << 24  # of a vector that is looked through
SHOWN = 6
HEADS = ("attn_q.", "attn_k.", "attn_v.")  # roles whose rows are whole heads


@dataclass(frozen=True)
class RowRun:
    """`count` rows of B from row `at`, which are those of A's tensor `key` from row `there`."""

    at: int
    key: str
    there: int
    count: int


def explain_misplaced_rows(case: DifferingPair) -> Iterator[Guess | Finding]:
    """Yield the guess that B's differing rows are other rows of A, from tensors of the same width.

    If some of them are not found in A, a finding that is not confirmed. Of a vector, runs of values
    are looked for in the same vector of A.
    """
    if case.a.columns == 1:
        yield from _explain_copied_values(case)
        return
    if case.numbers is not None or case.a.columns < COLUMNS or case.a.rows != case.b.rows:
        return
    pool = _all_rows(case.context, case.a, case.key)
    if pool is None:
        return
    # Find each row of B among all rows of A.
    own = pool.starts[pool.keys.index(case.key)]
    at = find_sources(
        pool, case.b, own, 0.0 if case.a.encoding == case.b.encoding else case.slack()
    )
    if at is None:
        return
    # Most of the rows that are not at their place must be found.
    moved = np.flatnonzero(at != own + np.arange(len(at)))
    known = moved[at[moved] >= 0]
    if not len(moved) or len(known) < MOST * len(moved) or not len(known):
        return
    found = [
        RowRun(int(known[first]), *pool.owner(source), count)
        for first, source, count in _source_runs(known, at[known])
    ]
    text = _runs_sentence(case, found)
    others = tuple(dict.fromkeys(run.key for run in found if run.key != case.key))
    lines = tuple(_run_text(case, run) for run in found[:SHOWN])
    lines += (f"{len(found) - SHOWN} more runs",) if len(found) > SHOWN else ()
    # Some were not found: likely, not confirmed.
    if len(known) < len(moved):
        part = f"{len(known)} of the {len(moved)} rows that differ; the others stand nowhere in A"
        yield make_finding(
            "wrong_rows",
            (case.key, *others),
            (text, part, *lines),
            case.before.relative,
            None,
            None,
            confirmed=False,
        )
        return
    yield case.guess(
        "wrong_rows",
        (text, *lines),
        "A",
        lambda rows: pool.take(at[rows]),
        where=(case.key, *others),
        free=len(known),
    )


def _explain_copied_values(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that all differing values of a vector are runs of A's that stand there too.

    Each run has COLUMNS values and as many different bytes at least, since zeros stand everywhere,
    and every value of its source is as in A.
    """
    a, b = case.a, case.b
    if a.encoding != b.encoding or a.rows != b.rows or a.rows > MOST_VALUES:
        return
    if a.row_bytes is None or a.row_bytes != b.row_bytes:
        return  # computed, not stored
    every = np.arange(a.rows)
    mine, theirs = a.raw(every), b.raw(every)
    apart = np.flatnonzero((mine != theirs).any(axis=1))
    if len(apart) < COLUMNS or 2 * len(apart) > a.rows:
        return
    stays = np.ones(a.rows, bool)
    stays[apart] = False
    data, size = mine.tobytes(), mine.shape[1]
    breaks = np.flatnonzero(np.diff(apart) > 1) + 1
    found: list[RowRun] = []
    # A run ends where the source of the values does, or where they agree again.
    for run in np.split(apart, breaks):
        at, count = int(run[0]), len(run)
        piece = theirs[at : at + count].tobytes()
        place = data.find(piece)
        there = place // size
        known = count >= COLUMNS and len(set(piece)) >= COLUMNS
        if not known or place < 0 or place % size or not stays[there : there + count].all():
            return
        found.append(RowRun(at, case.key, there, count))
    lines = tuple(_run_text(case, run, "value") for run in found[:SHOWN])
    lines += (f"{len(found) - SHOWN} more runs",) if len(found) > SHOWN else ()
    says = (_runs_sentence(case, found, "values"), *lines)
    proof = prove_bytes(theirs[apart].tobytes(), theirs[apart].size, len(found))
    yield make_finding("wrong_rows", (case.key,), says, case.before.relative, 0.0, proof)


def _source_runs(places: "Array", at: "Array") -> Iterator[tuple[int, int, int]]:
    """Yield (index in `places` of the first row, source row, length) of each run.

    In a run the row number in B and that of its source in A grow by one. `places` are B's rows,
    `at` the source of each.
    """
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    edges = [0, *breaks.tolist(), len(places)]
    for start, stop in pairwise(edges):
        yield from ((start + first, source, n) for first, source, n in source_runs(at[start:stop]))


def _runs_sentence(case: DifferingPair, found: list[RowRun], rows: str = "rows") -> str:
    """Return a sentence on which rows of A the rows of B are, without the tensor's name.

    It is the same for every tensor with the same defect. `rows` are called `values` in a vector.
    """
    one, size = _whole_part(case)
    whole = size and all(
        not (run.at % size or run.there % size or run.count % size) for run in found
    )
    if whole and all(run.key == case.key for run in found):
        held = "bytes" if one == "expert" else "values"
        pairs = [
            f"{one} {(run.at + i) // size} holds the {held} of {one} {(run.there + i) // size}"
            for run in found
            for i in range(0, run.count, size)
        ]
        return "; ".join(pairs[:SHOWN])
    if all(run.key == case.key for run in found):
        return (
            f"{rows} of B are other {rows} of the same tensor of A, which stand at their own place "
            "too"
        )
    return "rows of B are rows of other tensors of A"


def _whole_part(case: DifferingPair) -> tuple[str, int]:
    """Return the name of what a tensor's rows are made of, and its rows: an expert or a head.

    ("", 0) if the rows belong to neither.
    """
    if len(case.shape) == 3:
        return "expert", case.shape[1]
    heads = expected_heads(case, case.a.rows) if case.role.startswith(HEADS) else None
    return ("head", case.a.rows // heads) if heads and heads > 1 else ("", 0)


def _run_text(case: DifferingPair, run: RowRun, one: str = "row") -> str:
    """Return one run in words: the rows (`one` is each) of B, and those of A that they equal."""
    of = "" if run.key == case.key else f" of {run.key}"
    name = numbered_text(one, run.at, run.at + run.count)
    return f"{name}: A's {numbered_text(one, run.there, run.there + run.count)}{of}"


def _all_rows(context: "PairContext", like: RowReader, key: str) -> JoinedRows | None:
    """Return the rows of all of A's tensors with as many columns as `like`, joined; or None.

    They are joined once for each number of columns. None if they are too many, or if tensor `key`
    is not among them.
    """
    held = context.pools
    if like.columns not in held:
        chosen: dict[str, RowReader] = {}
        for name in context.sides("a"):
            reader = context.reader("a", name)
            if reader is not None and reader.columns == like.columns and reader.size:
                chosen[name] = reader
        total = sum(reader.size for reader in chosen.values())
        small = 0 < total <= POOL
        held[like.columns] = JoinedRows(list(chosen), list(chosen.values())) if small else None
    pool = held[like.columns]
    return pool if pool is not None and key in pool.keys else None


HYPOTHESES = (
    PairHypothesis(
        ("wrong_rows",), explain_misplaced_rows, 230, "reads the rows of all other tensors"
    ),
)
